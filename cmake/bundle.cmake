# cmake -DBINARIES=a;b -DOUTPUT=folder -P bundle.cmake
# Copies the binaries, stripped, and every shared library that they need except the C library's.
file(REMOVE_RECURSE ${OUTPUT})
file(MAKE_DIRECTORY ${OUTPUT})
file(GET_RUNTIME_DEPENDENCIES
  EXECUTABLES ${BINARIES}
  RESOLVED_DEPENDENCIES_VAR libraries
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv)\\.so")
if(missing)
  message(FATAL_ERROR "missing libraries: ${missing}")
endif()
file(COPY ${BINARIES} DESTINATION ${OUTPUT})
foreach(library IN LISTS libraries)
  file(COPY ${library} DESTINATION ${OUTPUT} FOLLOW_SYMLINK_CHAIN)
endforeach()
file(GLOB copied ${OUTPUT}/*)
foreach(file IN LISTS copied)
  if(NOT IS_SYMLINK ${file})
    execute_process(COMMAND strip ${file})
  endif()
endforeach()
