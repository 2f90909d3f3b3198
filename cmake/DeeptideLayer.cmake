# SPDX-License-Identifier: Apache-2.0
# deeptide_add_layer(<name> [COLD] SOURCES … [LIBRARIES …]): one folder = one object library; all objects go into ONE shared
# library, since the gate's registrar must survive linking and must exist once. COLD: no step runs it.
# A layer that touches tensors names deeptide_torch among its LIBRARIES; base, trace, config, io and launch stay free of torch.
set_property(GLOBAL PROPERTY DEEPTIDE_LAYERS "")
set_property(GLOBAL PROPERTY DEEPTIDE_LAYER_LIBRARIES "")

# deeptide_read_layers(<variable>): the names in src/layers.txt, lowest first, without their sub-rooms.
function(deeptide_read_layers variable)
  set(list ${PROJECT_SOURCE_DIR}/src/layers.txt)
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} layers REGEX "^[a-z]")
  list(TRANSFORM layers REPLACE ":.*" "")
  set(${variable} ${layers} PARENT_SCOPE)
endfunction()

function(deeptide_add_layer name)
  cmake_parse_arguments(ARG "COLD" "" "SOURCES;LIBRARIES" ${ARGN})
  set_property(GLOBAL APPEND PROPERTY DEEPTIDE_LAYERS ${name})
  if(NOT ARG_SOURCES)
    return()
  endif()
  add_library(deeptide_${name} OBJECT ${ARG_SOURCES})
  target_include_directories(deeptide_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(deeptide_${name} PRIVATE ${DEEPTIDE_STRICT_WARNINGS})
  if(ARG_COLD)
    target_compile_options(deeptide_${name} PRIVATE ${DEEPTIDE_COLD_OPTIONS})
  endif()
  target_link_libraries(deeptide_${name} PUBLIC ${ARG_LIBRARIES})
  deeptide_unite(deeptide_${name})
  if(deeptide_torch IN_LIST ARG_LIBRARIES)
    deeptide_precompile(deeptide_${name} layers)
  endif()
  set_property(GLOBAL APPEND PROPERTY DEEPTIDE_LAYER_LIBRARIES ${ARG_LIBRARIES})
  set_property(GLOBAL APPEND PROPERTY DEEPTIDE_OBJECTS $<TARGET_OBJECTS:deeptide_${name}>)
endfunction()

# deeptide_through_<layer>: the objects of this layer and of all below it, for tests and benchmarks, which use what the
# library hides. A program that links it has a gate of its own and must not load libdeeptide as well.
function(deeptide_close_layer layer)
  get_property(objects GLOBAL PROPERTY DEEPTIDE_OBJECTS)
  get_property(libraries GLOBAL PROPERTY DEEPTIDE_LAYER_LIBRARIES)
  list(REMOVE_DUPLICATES libraries)
  if(deeptide_torch IN_LIST libraries)
    list(APPEND libraries torch)
  endif()
  add_library(deeptide_through_${layer} INTERFACE)
  target_include_directories(deeptide_through_${layer} INTERFACE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/include)
  target_link_libraries(deeptide_through_${layer} INTERFACE ${objects} ${libraries})
endfunction()

function(deeptide_finish_library)
  get_property(objects GLOBAL PROPERTY DEEPTIDE_OBJECTS)
  get_property(libraries GLOBAL PROPERTY DEEPTIDE_LAYER_LIBRARIES)
  list(REMOVE_DUPLICATES libraries)
  add_library(deeptide SHARED ${objects})
  add_library(deeptide::deeptide ALIAS deeptide)
  target_include_directories(deeptide PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
    $<INSTALL_INTERFACE:include>)
  target_link_libraries(deeptide PUBLIC torch PRIVATE ${libraries})
  # Never unloaded: tensors made by our allocator, and the gate's registration, outlive every handle to the library.
  target_link_options(deeptide PRIVATE -Wl,-z,nodelete)
  # Symbols from other projects' headers and from static libraries are not marked hidden.
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(deeptide PRIVATE -Wl,--version-script=${exports})
  set_property(TARGET deeptide APPEND PROPERTY LINK_DEPENDS ${exports})
  set_target_properties(deeptide PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0)
endfunction()

# deeptide_add_test(<name> SOURCES … [THROUGH <layer>] [LABELS …] [PARTS <n>]): one gtest executable for a layer's tests,
# with the objects up to that layer, or up to a higher one that they use too. For each label, the target
# deeptide_tests_<label> builds its executables; deeptide_tests_<label>_of_<layer>, those of one folder. Ranks mostly wait
# for each other, so a long program runs as n tests at once, each with every n-th case.
function(deeptide_add_test name)
  cmake_parse_arguments(ARG "" "PARTS;TIMEOUT;THROUGH" "SOURCES;LABELS;LIBRARIES" ${ARGN})
  if(NOT ARG_THROUGH)
    get_filename_component(ARG_THROUGH ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  endif()
  add_executable(deeptide_${name}_test ${ARG_SOURCES})
  target_include_directories(deeptide_${name}_test PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_options(deeptide_${name}_test PRIVATE ${DEEPTIDE_WARNINGS} ${DEEPTIDE_COLD_OPTIONS})
  target_link_libraries(deeptide_${name}_test PRIVATE
    deeptide_through_${ARG_THROUGH} GTest::gtest GTest::gtest_main ${ARG_LIBRARIES})
  deeptide_unite(deeptide_${name}_test)
  get_target_property(libraries deeptide_through_${ARG_THROUGH} INTERFACE_LINK_LIBRARIES)
  if(deeptide_torch IN_LIST libraries)
    deeptide_precompile(deeptide_${name}_test tests)
  endif()
  get_filename_component(layer ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  foreach(label ${ARG_LABELS})
    foreach(target deeptide_tests_${label} deeptide_tests_${label}_of_${layer})
      if(NOT TARGET ${target})
        add_custom_target(${target})
      endif()
      add_dependencies(${target} deeptide_${name}_test)
    endforeach()
  endforeach()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  # Several ranks take longest, the engine's above all: begun first, none of them runs alone at the end.
  set(cost 1)
  if("ranks" IN_LIST ARG_LABELS)
    set(cost 2)
    if(ARG_THROUGH STREQUAL "engine")
      set(cost 3)
    endif()
  endif()
  if(NOT ARG_PARTS)
    set(ARG_PARTS 1)
  endif()
  set(environment "")
  if(NOT "gpu" IN_LIST ARG_LABELS)
    set(environment "CUDA_VISIBLE_DEVICES=;")  # torch takes pinned memory from CUDA where it finds a GPU
  endif()
  foreach(part RANGE 1 ${ARG_PARTS})
    set(test ${name})
    if(ARG_PARTS GREATER 1)
      string(APPEND test _${part})
    endif()
    math(EXPR index "${part} - 1")
    add_test(NAME ${test} COMMAND deeptide_${name}_test)
    set_tests_properties(${test} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} COST ${cost}
      ENVIRONMENT "${environment}GTEST_TOTAL_SHARDS=${ARG_PARTS};GTEST_SHARD_INDEX=${index}")
  endforeach()
endfunction()
