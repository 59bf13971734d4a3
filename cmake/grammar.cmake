# The grammar core of structured output: xgrammar from its source package, which tools/grammar.sh
# unpacks. Without it the server refuses requests for structured output. The presets asan and tsan leave it
# out, because it takes minutes to build. It is compiled without sanitizers everywhere, which would
# multiply those minutes: fuzz_grammar finds its crashes, and faults of our code around it.
file(STRINGS ${CMAKE_SOURCE_DIR}/requirements-build.txt xgrammar_line REGEX "^xgrammar==")
string(REPLACE "xgrammar==" "" xgrammar_version "${xgrammar_line}")
set(xgrammar_source ${CMAKE_SOURCE_DIR}/.cache/xgrammar-${xgrammar_version})

if(CACHALOT_WITH_GRAMMAR AND EXISTS ${xgrammar_source}/include/xgrammar/xgrammar.h)
  file(GLOB_RECURSE xgrammar_files ${xgrammar_source}/cpp/*.cc)
  list(FILTER xgrammar_files EXCLUDE REGEX "/tvm_ffi/")
  add_library(xgrammar STATIC ${xgrammar_files})
  target_include_directories(xgrammar SYSTEM PUBLIC
    ${xgrammar_source}/include ${xgrammar_source}/3rdparty/picojson
    ${xgrammar_source}/3rdparty/dlpack/include)
  target_compile_definitions(xgrammar PUBLIC XGRAMMAR_ENABLE_CPPTRACE=0)
  target_compile_options(xgrammar PRIVATE -w)
  # Its own standard. In C++20 clang instantiates the members of a vector of a type that is not complete
  # yet, because they are constexpr.
  set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17)
  target_sources(cachalot_text PRIVATE ${CMAKE_SOURCE_DIR}/src/text/grammar.cc)
  target_link_libraries(cachalot_text PRIVATE xgrammar)
else()
  message(STATUS "structured output is off: tools/grammar.sh fetches the xgrammar source")
  target_sources(cachalot_text PRIVATE ${CMAKE_SOURCE_DIR}/src/text/grammar_absent.cc)
endif()
