/* System calls with the rules of this engine: EINTR is retried, errno is returned as -errno, SIGPIPE never happens, no
 * call blocks. Stateless; the caller owns the descriptors. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "zp_internal.h"

/* More than this waits in no kernel queue unsent, so that a slow connection holds up little but its own frame. */
#define UNSENT_BYTES_MAX (512 << 10)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

int zp__sock_prepare(int fd)
{
	int type;
	socklen_t length = sizeof type;
	if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) < 0)
		return -errno;
	if (type != SOCK_STREAM)
		return -EPROTOTYPE;
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
		return -errno;
	/* These fail on stream sockets that are not TCP, which work without. */
	int on = 1, unsent = UNSENT_BYTES_MAX;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
	return 0;
}

/* Bytes sent, or -errno; -EAGAIN when there is no room. */
ssize_t zp__sock_send(int fd, struct iovec *iov, int count)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)count};
	ssize_t n;
	do
		n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : n;
}

/* Bytes received, or -errno; -EAGAIN when there are none, -ECONNRESET at the end of the stream. */
ssize_t zp__sock_receive(int fd, struct iovec *iov, int count)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)count};
	ssize_t n;
	do
		n = recvmsg(fd, &message, MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	if (n == 0)
		return -ECONNRESET;
	return n < 0 ? -errno : n;
}

/* True when the other side has not acknowledged all that was sent. */
bool zp__sock_has_unsent(int fd)
{
	int bytes = 0;
	return ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

int zp__eventfd_open(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return fd < 0 ? -errno : fd;
}

void zp__eventfd_signal(int fd)
{
	uint64_t one = 1;
	while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
		;
}

void zp__eventfd_drain(int fd)
{
	uint64_t count;
	while (read(fd, &count, sizeof count) < 0 && errno == EINTR)
		;
}

uint64_t zp__now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Zeroed memory that costs nothing until it is touched and goes back to the system when it is unmapped. NULL: none. */
void *zp__memory_map(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
	if (bytes >= 2 * HUGE_PAGE_BYTES)
		(void)madvise(memory, bytes, MADV_HUGEPAGE);
	return memory;
}

void zp__memory_unmap(void *memory, size_t bytes)
{
	if (memory)
		munmap(memory, bytes);
}
