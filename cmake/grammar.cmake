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

  # Its parser counts what it does, so that there can be a bound (src/text/grammar_work.h): a copy of its
  # source has calls where it looks at states.
  list(FILTER xgrammar_files EXCLUDE REGEX "/earley_parser.cc$")
  file(READ ${xgrammar_source}/cpp/earley_parser.cc parser)
  function(count_work before steps)
    string(FIND "${parser}" "${before}" found)
    if(found EQUAL -1)
      message(FATAL_ERROR "earley_parser.cc of xgrammar ${xgrammar_version} has no '${before}'")
    endif()
    string(REPLACE "${before}" "${before}\n  cachalot::text::spend_grammar_work(${steps});" counted "${parser}")
    set(parser "${counted}" PARENT_SCOPE)
  endfunction()
  count_work("bool RepeatDetector::IsVisited(const ParserState& state) const {" 1)
  count_work("parent_states_map = rule_id_to_completable_states_[state.rule_start_pos];"
    "parent_states_map.size()")
  count_work("latest_states = scanable_state_history_[scanable_state_history_.size() - 1];"
    "latest_states.size()")
  # Once for every state of a mask, whose set of tokens is merged then.
  count_work("void EarleyParser::PopLastStates(int32_t cnt) {" 16)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/xgrammar/earley_parser.cc
    CONTENT "#include \"text/grammar_work.h\"\n${parser}" @ONLY)

  add_library(xgrammar STATIC ${xgrammar_files} ${CMAKE_BINARY_DIR}/xgrammar/earley_parser.cc)
  target_include_directories(xgrammar PRIVATE ${xgrammar_source}/cpp ${CMAKE_SOURCE_DIR}/src)
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
