# Compile time. Code that runs once per process, request or graph is compiled at -O1 and in batches (unity builds), which
# takes a third of the time; code that runs for each token, byte or pixel keeps -O3 and a file of its own. CMake leaves files
# with options of their own out of a batch. ggml's kernels are not touched.

set(MOEOFF_HOT  "$<$<CONFIG:Release>:-O3>")
# With gcc, -O1 leaves out what contracts a * b + c to one instruction; numbers of graphs must not depend on that.
set(MOEOFF_COLD "$<$<CONFIG:Release>:-O1>" "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-fexpensive-optimizations>")

# moeoff_compile(<target> <files per batch> <hot file>...): names as the target lists them, regular expressions
function(moeoff_compile target batch)
    target_compile_options(${target} PRIVATE ${MOEOFF_COLD})
    if(batch GREATER 1)
        set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
    endif()
    get_target_property(sources ${target} SOURCES)
    get_target_property(folder ${target} SOURCE_DIR)
    foreach(name ${ARGN})
        set(files ${sources})
        list(FILTER files INCLUDE REGEX "^(.*/)?${name}\\.cpp$")
        if(NOT files)
            message(FATAL_ERROR "${target} has no file ${name}.cpp: mend ${CMAKE_CURRENT_LIST_FILE}")
        endif()
        foreach(file ${files})
            get_filename_component(file ${file} ABSOLUTE BASE_DIR ${folder})
            set_property(SOURCE ${file} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS ${MOEOFF_HOT})
        endforeach()
    endforeach()
endfunction()

moeoff_compile(llama 40
    llama-batch llama-context llama-cparams llama-grammar llama-graph llama-impl llama-io "llama-kv-cache[a-z0-9-]*"
    "llama-memory[a-z-]*" llama-mmap llama-sampler llama-vocab moeoff-llama unicode)
moeoff_compile(llama-common 8
    log "ngram-[a-z]*" peg-parser reasoning-budget sampling speculative trie)
moeoff_compile(moeoff-template-engine 6 json unicode)
set_target_properties(moeoff-template-engine PROPERTIES UNITY_BUILD_CODE_AFTER_INCLUDE "#undef FILENAME")
moeoff_compile(mtmd 16 mtmd-audio "mtmd-helper[a-z-]*" mtmd-image)
moeoff_compile(server-context 4 server-context)
moeoff_compile(llama-server-impl 3)
moeoff_compile(cpp-httplib 1)
