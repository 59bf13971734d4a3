# The grammar core of structured output: xgrammar from its source package, which tools/grammar.sh
# unpacks. Without it the server refuses requests for structured output. xgrammar 0.2.8 does not compile
# with clang 19 and libstdc++ 12 (an incomplete type in a variant), so the clang presets leave it out.
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
  if(CACHALOT_SANITIZE)
    target_compile_options(xgrammar PRIVATE -fsanitize=${CACHALOT_SANITIZE} -fno-omit-frame-pointer)
  endif()
  target_sources(cachalot_text PRIVATE ${CMAKE_SOURCE_DIR}/src/text/grammar.cc)
  target_link_libraries(cachalot_text PRIVATE xgrammar)
else()
  message(STATUS "structured output is off: tools/grammar.sh fetches the xgrammar source")
  target_sources(cachalot_text PRIVATE ${CMAKE_SOURCE_DIR}/src/text/grammar_absent.cc)
endif()
