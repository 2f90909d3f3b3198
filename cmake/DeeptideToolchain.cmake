# SPDX-License-Identifier: Apache-2.0
# Build type, compiler cache, linker, warnings and sanitizers.
if(PROJECT_IS_TOP_LEVEL)
  # A project that adds us has its own settings; flags that a user gave stay.
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE RelWithDebInfo)
  endif()
  if(CMAKE_CXX_FLAGS_RELWITHDEBINFO STREQUAL "-O2 -g -DNDEBUG")
    set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")  # a sixteenth of the compiler's time; Debug is for debuggers
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()
find_program(DEEPTIDE_CCACHE ccache)
if(DEEPTIDE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${DEEPTIDE_CCACHE}")
endif()
find_program(DEEPTIDE_MOLD mold)
if(DEEPTIDE_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
# For code whose speed hardly matters: a quarter to a third off the compiler's time. Tests, and layers that use torch: what
# those do element by element is vector code, which keeps -O2.
set(DEEPTIDE_COLD_OPTIONS $<$<CONFIG:Release,RelWithDebInfo>:-O1>)
if(DEEPTIDE_SANITIZE)
  set(DEEPTIDE_COLD_OPTIONS "")  # the level below is for all
  string(REPLACE ";" "," _sanitize "${DEEPTIDE_SANITIZE}")
  # Unoptimised, clang compiles in a third of the time, and the tests, which mostly wait for one another, take no longer.
  # The thread sanitizer's tests compute more, and gcc gains little.
  set(_optimise -O0)
  if(_sanitize STREQUAL "thread")
    set(_optimise -O1)
  endif()
  add_compile_options(${_optimise} -g1 -fsanitize=${_sanitize} -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=${_sanitize})
  # UBSan's vptr check needs type information that libtorch's hidden classes do not export.
  if(_sanitize MATCHES "undefined")
    add_compile_options(-fno-sanitize=vptr)
  endif()
endif()
# Only the fused multiply-adds that are written: vectors and their tails round alike, on every instruction set. For all
# sources, since gcc takes this option from a precompiled header rather than from its command line.
add_compile_options(-ffp-contract=off)
# gcc looks for garbage from 128 MB on, over and over, and finds little: a tenth of its time, for a tenth more memory.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=4000000>)
# The library exports only what include/ marks with DEEPTIDE_API.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(DEEPTIDE_WARNINGS -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)
# For the product, as CI builds it: headers of torch and others are SYSTEM and stay out of it. No sign conversions: counts
# are signed in torch and unsigned in std, and a cast at each border would say nothing.
set(DEEPTIDE_STRICT_WARNINGS ${DEEPTIDE_WARNINGS})
if(DEEPTIDE_WERROR)
  list(APPEND DEEPTIDE_WARNINGS -Werror)
  list(APPEND DEEPTIDE_STRICT_WARNINGS -Wconversion -Wno-sign-conversion -Wold-style-cast -Wnon-virtual-dtor
    -Woverloaded-virtual -Wunused-const-variable -Werror)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Beyond locals, it also means the using declarations of neighbours in a unity build.
    list(APPEND DEEPTIDE_STRICT_WARNINGS -Wshadow=local)
  else()
    list(APPEND DEEPTIDE_STRICT_WARNINGS -Wshadow)
    # libstdc++ 12's own stable_sort calls what libstdc++ 12 deprecates.
    list(APPEND DEEPTIDE_WARNINGS -Wno-deprecated-declarations)
    list(APPEND DEEPTIDE_STRICT_WARNINGS -Wno-deprecated-declarations)
  endif()
endif()
