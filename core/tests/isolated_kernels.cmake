# Checks that each SIMD path's object file offers the linker its one entry point and nothing else. A function that two
# object files offer, say an inline one of the standard library, is linked once: if that copy were the one compiled for
# AVX-512, every path would use it, and an older machine would die of an illegal instruction.
# Called by ctest as: cmake -DNM=<nm> -DLIBRARY=<libsatrap_core.a> -P isolated_kernels.cmake
execute_process(COMMAND ${NM} -A -C --defined-only --extern-only ${LIBRARY} OUTPUT_VARIABLE symbols
  COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "kernels_[a-z0-9]+\\.cpp\\.o:[^\n]*" symbols "${symbols}")
set(found 0)
foreach(symbol IN LISTS symbols)
  if(NOT symbol MATCHES "^kernels_([a-z0-9]+)\\.cpp\\.o:[0-9a-f]+ T satrap::([a-z0-9]+)_kernels\\(\\)$"
     OR NOT CMAKE_MATCH_1 STREQUAL CMAKE_MATCH_2)
    message(FATAL_ERROR "shared code in a SIMD path's object file: ${symbol}\n"
      "put it into the anonymous namespace of that file, or out of it")
  endif()
  math(EXPR found "${found} + 1")
endforeach()
if(found EQUAL 0)
  message(FATAL_ERROR "no kernels found in ${LIBRARY}")
endif()
