# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Precompiled headers: torch's take ten seconds of each compiler run. With gcc they take half a gigabyte of disk per set of
# flags. A compiler cache serves what used them only with the sloppiness that the Makefile sets.
option(DEEPTIDE_PRECOMPILE "Precompile torch's headers" ${PROJECT_IS_TOP_LEVEL})

set(_plain <ATen/core/Tensor.h> <algorithm> <functional> <map> <memory> <optional> <set> <string> <vector>)
# Each run instantiates anew what these headers' inline functions use: 3 to 5 s with operators, autograd and c10d, half a
# second with tensors alone. So vector code gets only these, and uses their methods.
set(DEEPTIDE_PRECOMPILED_vectors ${_plain})
set(DEEPTIDE_PRECOMPILED_layers ${_plain} <ATen/ops/empty.h> <ATen/ops/zeros.h> <torch/csrc/autograd/function.h>
  <torch/csrc/distributed/c10d/Backend.hpp> <filesystem> <sstream> <thread>)
set(DEEPTIDE_PRECOMPILED_tests ${DEEPTIDE_PRECOMPILED_layers} <gtest/gtest.h>)

# deeptide_code_options(<variable> <target>): the target's compile options but those about warnings.
function(deeptide_code_options variable target)
  get_target_property(options ${target} COMPILE_OPTIONS)
  list(FILTER options EXCLUDE REGEX "-W")
  list(REMOVE_DUPLICATES options)
  set(${variable} "${options}" PARENT_SCOPE)
endfunction()

# deeptide_precompile(<target> <set>): gives the headers above to a target of this set, whose targets have the same flags:
# layers, vectors or tests.
function(deeptide_precompile target set)
  if(NOT DEEPTIDE_PRECOMPILE)
    return()
  endif()
  set(owner deeptide_precompiled_${set})  # nearly empty: the others wait for all of it
  if(NOT TARGET ${owner})
    set(source ${PROJECT_BINARY_DIR}/${owner}.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "int main() { return 0; }\n")
    if(set STREQUAL "tests")
      add_executable(${owner} EXCLUDE_FROM_ALL ${source})  # as position-independent as they are
      target_link_libraries(${owner} PRIVATE GTest::gtest)
    else()
      add_library(${owner} OBJECT EXCLUDE_FROM_ALL ${source})
    endif()
    get_target_property(options ${target} COMPILE_OPTIONS)
    target_compile_options(${owner} PRIVATE ${options})
    target_link_libraries(${owner} PRIVATE deeptide_torch)
    target_precompile_headers(${owner} PRIVATE ${DEEPTIDE_PRECOMPILED_${set}})
  endif()
  # gcc compiles with the header's code generation options, whatever the target's are.
  deeptide_code_options(wanted ${target})
  deeptide_code_options(given ${owner})
  if(NOT wanted STREQUAL given)
    message(FATAL_ERROR "${target} is compiled with '${wanted}', its precompiled header with '${given}'")
  endif()
  target_precompile_headers(${target} REUSE_FROM ${owner})
endfunction()
