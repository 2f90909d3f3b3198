# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` and a wheel contain. Nothing here affects the build tree.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

target_compile_features(deeptide PUBLIC cxx_std_20)

# A machine with only torch and Python lacks these, so a wheel carries them beside libdeeptide.
set(DEEPTIDE_BUNDLED "^lib(hwy|fmt|uring)\\.so")

if(SKBUILD)
  # Wheels hold no symbolic links, so the library has one name there.
  set_property(TARGET deeptide PROPERTY VERSION)
  set_property(TARGET deeptide PROPERTY SOVERSION)
  set_target_properties(deeptide PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")
  install(TARGETS deeptide LIBRARY DESTINATION deeptide COMPONENT deeptide)
  # The command finds the bundled libraries relative to <prefix>/bin, where an environment keeps its commands.
  set(_python "python${Python3_VERSION_MAJOR}.${Python3_VERSION_MINOR}")
  set_target_properties(deeptide_command PROPERTIES
    INSTALL_RPATH "$ORIGIN/../lib/${_python}/site-packages/deeptide;$ORIGIN/../lib/${_python}/dist-packages/deeptide")
  install(TARGETS deeptide_command RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT deeptide)
  install(CODE "
    set(bundled \"${DEEPTIDE_BUNDLED}\")
    set(library \"$<TARGET_FILE:deeptide>\")" COMPONENT deeptide)
  install(CODE [[
    file(GET_RUNTIME_DEPENDENCIES LIBRARIES "${library}" RESOLVED_DEPENDENCIES_VAR found
      UNRESOLVED_DEPENDENCIES_VAR missing PRE_INCLUDE_REGEXES "${bundled}" PRE_EXCLUDE_REGEXES ".*")
    if(missing)
      message(FATAL_ERROR "cannot bundle ${missing}: not found")
    endif()
    foreach(path ${found})
      get_filename_component(name "${path}" NAME)
      file(REAL_PATH "${path}" real)
      message(STATUS "Bundling ${name}")
      configure_file("${real}" "${CMAKE_INSTALL_PREFIX}/deeptide/${name}" COPYONLY)
    endforeach()]] COMPONENT deeptide)
  return()
endif()

# Torch lies where the user's Python has it: keep the path from which it was linked.
set_target_properties(deeptide PROPERTIES INSTALL_RPATH "$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS deeptide EXPORT deeptideTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT deeptide)
install(TARGETS deeptide_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT deeptide)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/deeptide ${PROJECT_BINARY_DIR}/include/deeptide
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT deeptide)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/deeptide)
install(EXPORT deeptideTargets NAMESPACE deeptide:: DESTINATION ${_package_dir} COMPONENT deeptide)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/deeptideConfig.cmake.in
  ${PROJECT_BINARY_DIR}/deeptideConfig.cmake INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/deeptideConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/deeptideConfig.cmake ${PROJECT_BINARY_DIR}/deeptideConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/DeeptideTorch.cmake
  DESTINATION ${_package_dir} COMPONENT deeptide)
