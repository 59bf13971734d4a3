# Compiler flags of every target, in one interface library.
add_library(cachalot_flags INTERFACE)
add_library(cachalot::flags ALIAS cachalot_flags)
target_include_directories(cachalot_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(cachalot_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wno-missing-field-initializers -fno-math-errno>
  # gcc 12 reports overlaps that cannot be in the standard library's string concatenation.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
  # Fused multiply-adds appear only where the source asks for them: results do not depend on what the
  # compiler chose to contract.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(CACHALOT_WERROR)
  target_compile_options(cachalot_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CACHALOT_SANITIZE)
  target_compile_options(cachalot_flags INTERFACE
    -fsanitize=${CACHALOT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(cachalot_flags INTERFACE -fsanitize=${CACHALOT_SANITIZE})
endif()
