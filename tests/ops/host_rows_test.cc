// Rows of tables in host memory, sent to a backend that works in host memory as well.
#include "tests/support/host_rows.h"

namespace cachalot::ops {
namespace {

TEST(HostRows, ArriveInOrder) {
  Memory& memory = **backend_memory(Backend::kCpu);
  test::check_host_rows(memory, nullptr);
  ThreadPool pool(2);
  test::check_host_rows(memory, &pool);
}

}  // namespace
}  // namespace cachalot::ops
