# Every dependency as one alias target cachalot::dep::<name>. The packages are listed in
# packages-debian.txt; nothing is downloaded.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)

function(cachalot_dep name)
  add_library(cachalot_dep_${name} INTERFACE)
  add_library(cachalot::dep::${name} ALIAS cachalot_dep_${name})
  target_link_libraries(cachalot_dep_${name} INTERFACE ${ARGN})
endfunction()

find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(tl-expected REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(hwy REQUIRED)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(edit REQUIRED IMPORTED_TARGET libedit)

cachalot_dep(fmt fmt::fmt)
cachalot_dep(spdlog spdlog::spdlog Threads::Threads)
cachalot_dep(expected tl::expected)
cachalot_dep(json nlohmann_json::nlohmann_json)
cachalot_dep(cli11 CLI11::CLI11)
cachalot_dep(hwy hwy::hwy)
cachalot_dep(pcre2 PkgConfig::pcre2)
cachalot_dep(edit PkgConfig::edit)
