# SPDX-License-Identifier: Apache-2.0
# A toolchain file: the newest clang++ of this machine, as tools/clang.sh finds it (tools/setup.sh clang installs one).
if(NOT CMAKE_CXX_COMPILER)
  execute_process(COMMAND ${CMAKE_CURRENT_LIST_DIR}/../tools/clang.sh clang++
    OUTPUT_VARIABLE CMAKE_CXX_COMPILER OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
