// Which levels of the CPU backend this machine can run, best first: "avx512 avx2 sse42". Compiled by wheels.py, asked by moeoff/system/machine.py before
// any other library is loaded, so it must run on every CPU of its architecture.
#include <string.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "no levels are known for this architecture"
#endif

const char * moeoff_cpu_levels(void) {
    static char out[64];
    out[0] = '\0';
#if defined(__x86_64__)
    __builtin_cpu_init();  // asks the CPU, and whether the system saves the wide registers
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    if (avx512) {
        strcat(out, "avx512 ");
    }
    if (avx2) {  // every CPU with AVX2 has F16C, for which GCC has a name only since version 11
        strcat(out, "avx2 ");
    }
    if (__builtin_cpu_supports("sse4.2")) {
        strcat(out, "sse42 ");
    }
#elif defined(__aarch64__)
    const unsigned long found = getauxval(AT_HWCAP);
    const unsigned long fp16 = 1UL << 10, dotprod = 1UL << 20;  // HWCAP_ASIMDHP, HWCAP_ASIMDDP of asm/hwcap.h
    if ((found & fp16) && (found & dotprod)) {
        strcat(out, "dotprod ");
    }
    strcat(out, "neon ");
#endif
    return out;
}
