// Loaded into QEMU ahead of the C library. QEMU's user network listens for forwarded ports with a
// backlog of 1: of a burst of connections all but two are lost, and come back by TCP's own retries,
// up to a minute later. Here every listening socket gets a backlog that a server has.

#include <sys/syscall.h>
#include <unistd.h>

namespace {
constexpr int kBacklog = 2048;
}

extern "C" int listen(int fd, int backlog) noexcept {
  return static_cast<int>(syscall(SYS_listen, fd, backlog > kBacklog ? backlog : kBacklog));
}
