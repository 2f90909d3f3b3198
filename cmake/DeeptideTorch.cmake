# SPDX-License-Identifier: Apache-2.0
# Finds torch and makes the target `torch`: its libraries, headers and C++ ABI. Part of the installed package as well.
# torch's own package is used where it is a CPU build. That of a CUDA or ROCm build wants the whole toolkit it was built
# with, which machines that only train lack; we link its libraries and compile against its headers without it.
# In: Torch_DIR, or Python3_EXECUTABLE, whose torch it is then. Out: Torch_DIR, Torch_VERSION, TORCH_INCLUDE_DIRS,
# TORCH_INSTALL_PREFIX, TORCH_ACCELERATOR: cuda, hip or empty.
if(NOT Torch_DIR AND Python3_EXECUTABLE)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE _prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_prefix)
    set(Torch_DIR "${_prefix}/Torch" CACHE PATH "The folder of torch's CMake package")
  endif()
endif()

# Written when torch was built: __version__ = '2.11.0+cu130', and cuda and hip: a version or None.
get_filename_component(_torch "${Torch_DIR}/../../.." ABSOLUTE)
set(_accelerator "")
if(Torch_DIR AND EXISTS "${_torch}/version.py")
  file(STRINGS "${_torch}/version.py" _accelerator REGEX "^(cuda|hip)[^=]*= *'")
  file(STRINGS "${_torch}/version.py" _version REGEX "^__version__ = ")
endif()
string(REGEX MATCH "^(cuda|hip)" TORCH_ACCELERATOR "${_accelerator}")

if(_accelerator AND NOT TARGET torch)
  string(REGEX REPLACE "^[^']*'([0-9.]+).*" "\\1" Torch_VERSION "${_version}")
  set(TORCH_INSTALL_PREFIX "${_torch}")
  set(TORCH_INCLUDE_DIRS "${_torch}/include" "${_torch}/include/torch/csrc/api/include")
  add_library(torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(torch PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${TORCH_INCLUDE_DIRS}")
  # libtorch.so brings the accelerator's libraries, whose own dependencies the loader finds by their run paths. It also
  # exports a part of an older libstdc++: without the whole one before it, std::filesystem::remove_all calls address 0.
  target_link_libraries(torch INTERFACE -Wl,--push-state,--no-as-needed stdc++
    "${_torch}/lib/libtorch_cpu.so" "${_torch}/lib/libc10.so" "${_torch}/lib/libtorch.so" -Wl,--pop-state)
  target_link_options(torch INTERFACE -Wl,--allow-shlib-undefined)
  message(STATUS "Found torch ${Torch_VERSION} in ${_torch}: an accelerator's build")
elseif(NOT TARGET torch)
  # torch's package warns where it finds no static kineto, which wheels have inside libtorch_cpu.
  if(EXISTS "${_torch}/lib/libtorch_cpu.so" AND NOT EXISTS "${_torch}/lib/libkineto.a")
    set(kineto_LIBRARY "${_torch}/lib/libtorch_cpu.so")
  endif()
  find_package(Torch REQUIRED)
endif()
