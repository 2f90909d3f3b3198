# SPDX-License-Identifier: Apache-2.0
find_package(Python3 COMPONENTS Interpreter Development.Module)
if(NOT Torch_DIR AND Python3_Interpreter_FOUND)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE _torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND CMAKE_PREFIX_PATH "${_torch_prefix}")
endif()
find_package(Torch REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(HWY CONFIG QUIET)
if(NOT TARGET hwy::hwy)
  find_library(DEEPTIDE_HWY_LIBRARY hwy REQUIRED)
  find_path(DEEPTIDE_HWY_INCLUDE hwy/highway.h REQUIRED)
  add_library(hwy::hwy UNKNOWN IMPORTED)
  set_target_properties(hwy::hwy PROPERTIES IMPORTED_LOCATION "${DEEPTIDE_HWY_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${DEEPTIDE_HWY_INCLUDE}")
endif()
find_path(DEEPTIDE_GLOO_INCLUDE gloo/algorithm.h REQUIRED)  # headers only: torch carries the library
if(DEEPTIDE_TESTS)
  find_package(GTest REQUIRED)
endif()

# What every layer that touches tensors needs.
add_library(deeptide_torch INTERFACE)
target_include_directories(deeptide_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS} ${DEEPTIDE_GLOO_INCLUDE})
target_compile_definitions(deeptide_torch INTERFACE USE_C10D_GLOO)
