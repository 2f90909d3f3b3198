# SPDX-License-Identifier: Apache-2.0
# Installs the build into an empty prefix, then configures, builds and runs the consumer against it.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(code)
    message(FATAL_ERROR "${ARGN}\nended with ${code}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${prefix} ${WORK_DIR}/consumer)
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} --component deeptide)
run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/consumer -G ${GENERATOR} -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
  -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_CXX_COMPILER=${CXX_COMPILER}
  -D QUICKSTART=${SOURCE_DIR}/../../../examples/quickstart.cc
  -D CMAKE_CXX_COMPILER_LAUNCHER=${CXX_COMPILER_LAUNCHER})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/consumer)

run(${WORK_DIR}/consumer/consumer)
if(NOT output MATCHES "stage 3, micro-batch 4")
  message(FATAL_ERROR "the consumer printed: ${output}")
endif()
run(${prefix}/bin/deeptide -q --num_ranks 2 ${WORK_DIR}/consumer/consumer)
if(NOT output MATCHES "\\[rank 1\\] stage 3, micro-batch 4")
  message(FATAL_ERROR "the installed launcher printed: ${output}")
endif()
run(${prefix}/bin/deeptide -q --num_ranks 2 ${WORK_DIR}/consumer/quickstart)
if(NOT output MATCHES "epoch 9 loss 0\\.")
  message(FATAL_ERROR "the quickstart outside the tree printed: ${output}")
endif()
