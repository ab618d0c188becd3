#include "moeoff-row-products.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <new>
#include <vector>

int moeoff_row_products(int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out) {
    if (type < 0 || type >= GGML_TYPE_COUNT || n_rows < 0 || n_cols <= 0 || n_x < 0) {
        return -1;
    }
    ggml_cpu_init(); // tables that some processors' kernels read; once
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu((ggml_type) type);
    const ggml_type              other  = traits->vec_dot_type;
    const ggml_from_float_t      convert = ggml_get_type_traits_cpu(other)->from_float;
    if (!traits->vec_dot || n_cols % ggml_blck_size((ggml_type) type) || n_cols % ggml_blck_size(other) || (other != GGML_TYPE_F32 && !convert)) {
        return -1;
    }
    const size_t         row_size = ggml_row_size((ggml_type) type, n_cols);
    std::vector<uint8_t> converted;
    try {
        converted.resize(ggml_row_size(other, n_cols));
    } catch (const std::bad_alloc &) {
        return -1;
    }
    for (int32_t i = 0; i < n_x; i++) {
        const void * column = x + (size_t) i * n_cols;
        if (other != GGML_TYPE_F32) {
            convert((const float *) column, converted.data(), n_cols);
            column = converted.data();
        }
        for (int32_t r = 0; r < n_rows; r++) {
            traits->vec_dot(n_cols, out + (size_t) i * n_rows + r, 0, (const uint8_t *) rows + r * row_size, 0, column, 0, 1);
        }
    }
    return 0;
}
