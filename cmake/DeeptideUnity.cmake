# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Unity builds: several sources per compiler run, because parsing torch's headers costs more than compiling our code.
# -DDEEPTIDE_UNITY=OFF compiles each source alone, which is quicker while one file is edited repeatedly.
option(DEEPTIDE_UNITY "Compile several sources at once: a full build is quicker, a rebuild after one edit slower" ON)
set(DEEPTIDE_UNITY_BATCH 16 CACHE STRING "The number of sources per compiler run")
mark_as_advanced(DEEPTIDE_UNITY_BATCH)

# Sources whose anonymous namespaces clash with those of their neighbours. Rename what clashes rather than add a line.
set(DEEPTIDE_UNITY_ALONE
  distributed_options_test.cc elasticity_test.cc failures_test.cc host_failures_test.cc host_transport_test.cc
  meeting_test.cc pages_test.cc table_cases.cc transport_test.cc)

# deeptide_vector_sources(<variable> <source> …): those that Highway compiles once per instruction set, and which include
# themselves.
function(deeptide_vector_sources variable)
  set(found "")
  foreach(source ${ARGN})
    get_filename_component(path "${source}" ABSOLUTE)
    if(EXISTS "${path}")
      file(STRINGS "${path}" includes_itself REGEX "HWY_TARGET_INCLUDE" LIMIT_COUNT 1)
      if(includes_itself)
        list(APPEND found ${source})
      endif()
    endif()
  endforeach()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

# Joins the sources of a target. Left alone are sources with compiler options of their own (CMake sees to that), and those
# of the list above.
function(deeptide_unite target)
  if(NOT DEEPTIDE_UNITY)
    return()
  endif()
  # In a unity build a class with private helpers is not in the main file, which is all that this warns about.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  get_target_property(folder ${target} SOURCE_DIR)
  set(joined 0)
  foreach(source ${sources})
    get_filename_component(name "${source}" NAME)
    get_filename_component(path "${source}" ABSOLUTE BASE_DIR "${folder}")
    if(name IN_LIST DEEPTIDE_UNITY_ALONE)
      set_source_files_properties("${path}" TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    else()
      math(EXPR joined "${joined} + 1")
    endif()
  endforeach()
  # A last batch of few sources costs as many headers, while the others take all the time: then all are of one size.
  set(size ${DEEPTIDE_UNITY_BATCH})
  math(EXPR last "${joined} % ${size}")
  math(EXPR half "${size} / 2")
  if(joined GREATER size AND last GREATER 0 AND last LESS half)
    math(EXPR batches "${joined} / ${size} + 1")
    math(EXPR size "(${joined} + ${batches} - 1) / ${batches}")
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE BATCH UNITY_BUILD_BATCH_SIZE ${size}
    UNITY_BUILD_RELOCATABLE ON)  # so that a compiler cache serves every checkout
endfunction()
