# The sm_90a backend: src/ops/cuda/*.cu, compiled one at a time (each takes up to 2 GiB), linked into
# cachalot_ops with a static CUDA runtime. Nothing links the driver, so the binary starts without one.
enable_language(CUDA)
find_package(CUDAToolkit 13.0 REQUIRED)

# CMake 3.25 does not know the dialect CUDA20, which nvcc 13.0 has.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=1)

# Flags and standard of a target with .cu files.
function(cachalot_cuda_target target)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20
    CUDA_RUNTIME_LIBRARY Static
    JOB_POOL_COMPILE nvcc)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo
      # 2810: nvcc 13.0 takes the assignment of a [[nodiscard]] type for a dropped value.
      -diag-suppress=2810
      -Xptxas=--warn-on-spills,--warn-on-local-memory-usage
      -Xcompiler=-fno-strict-aliasing,-Wno-psabi>)
endfunction()

file(GLOB cachalot_cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ops/cuda/*.cu)
add_library(cachalot_ops_cuda OBJECT ${cachalot_cuda_sources})
cachalot_cuda_target(cachalot_ops_cuda)
target_link_libraries(cachalot_ops_cuda PRIVATE cachalot_quant CUDA::cudart_static)

target_sources(cachalot_ops PRIVATE $<TARGET_OBJECTS:cachalot_ops_cuda>
                                    ${CMAKE_SOURCE_DIR}/src/ops/cuda/kernels.cc
                                    ${CMAKE_SOURCE_DIR}/src/ops/cuda/memory.cc
                                    ${CMAKE_SOURCE_DIR}/src/ops/cuda/op_timer.cc
                                    ${CMAKE_SOURCE_DIR}/src/ops/cuda/op_graph.cc)
target_link_libraries(cachalot_ops PUBLIC CUDA::cudart_static)

# A folder with binaries and the shared libraries that a bare GPU host lacks; they find each other by
# $ORIGIN. Built by the preset `device`: cmake --build --preset device --target bundle.
if(CACHALOT_BUNDLE)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  set(CMAKE_INSTALL_RPATH "$ORIGIN")
  function(cachalot_bundle)
    set(files)
    foreach(target IN LISTS ARGN)
      list(APPEND files $<TARGET_FILE:${target}>)
    endforeach()
    add_custom_target(bundle
      COMMAND ${CMAKE_COMMAND} "-DBINARIES=${files}" -DOUTPUT=${CMAKE_BINARY_DIR}/bundle
              -P ${CMAKE_SOURCE_DIR}/cmake/bundle.cmake
      DEPENDS ${ARGN}
      VERBATIM)
  endfunction()
endif()
