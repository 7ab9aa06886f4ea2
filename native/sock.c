/* System calls with the conventions of the engine: EINTR is retried, errors are returned as -errno, no SIGPIPE, no call
 * blocks. Stateless; the caller owns the descriptors. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h> /* Its tcp_info has more than that of netinet/tcp.h. */
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "sock.h"

/* Bound on unsent bytes in the kernel (TCP_NOTSENT_LOWAT): a slow connection delays little more than its own frame. */
#define UNSENT_BYTES_MAX (512 << 10)

/* True if both ends are on this host: it is a Unix-domain socket, or both ends have the same address. */
bool zp__sock_is_local(int fd)
{
	struct sockaddr_storage own, other;
	socklen_t own_length = sizeof own, other_length = sizeof other;
	if (getsockname(fd, (struct sockaddr *)&own, &own_length) < 0)
		return false;
	if (own.ss_family == AF_UNIX)
		return true;
	if (getpeername(fd, (struct sockaddr *)&other, &other_length) < 0 || own.ss_family != other.ss_family)
		return false;
	if (own.ss_family == AF_INET)
		return ((struct sockaddr_in *)&own)->sin_addr.s_addr == ((struct sockaddr_in *)&other)->sin_addr.s_addr;
	if (own.ss_family != AF_INET6)
		return false;
	const struct in6_addr *a = &((struct sockaddr_in6 *)&own)->sin6_addr;
	return memcmp(a, &((struct sockaddr_in6 *)&other)->sin6_addr, sizeof *a) == 0;
}

/* Within a host the pacing of BBR gains nothing and costs a third of the throughput. The kernel restricts which
 * algorithms an unprivileged process may choose; Reno is always allowed. */
static void choose_congestion_control(int fd)
{
	if (zp__sock_is_local(fd) && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) < 0)
		(void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/* Makes the kernel close an idle connection whose other end does not answer keep-alive probes for `timeout_ms`.
 *
 * TCP_USER_TIMEOUT would also cover connections with data in flight, but is not used: it closes connections whose other
 * end answers but has not read anything for that long, because it is stopped or does not know the attempt of the next
 * frame yet. zp__links_check() can tell these cases apart. */
static void keep_alive(int fd, uint32_t timeout_ms)
{
	uint32_t probes = 3, idle_s = timeout_ms / 2000, interval_s = timeout_ms / 2000 / probes;
	int on = 1, idle = idle_s ? (int)idle_s : 1, interval = interval_s ? (int)interval_s : 1, count = (int)probes;
	(void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

int zp__sock_prepare(int fd, uint32_t path_timeout_ms)
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
	/* These fail on stream sockets other than TCP, which do not need them. */
	int on = 1, unsent = UNSENT_BYTES_MAX;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
	choose_congestion_control(fd);
	if (path_timeout_ms)
		keep_alive(fd, path_timeout_ms);
	return 0;
}

/* Returns the bytes sent, or -errno; -EAGAIN: the socket is full. */
ssize_t zp__sock_send(int fd, struct iovec *iov, int count)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)count};
	ssize_t n;
	do
		n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : n;
}

/* Returns the bytes received, or -errno; -EAGAIN: there are none; -ECONNRESET: end of the stream. */
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

static bool is_unix(int fd)
{
	struct sockaddr_storage own;
	socklen_t length = sizeof own;
	return getsockname(fd, (struct sockaddr *)&own, &length) == 0 && own.ss_family == AF_UNIX;
}

/* True if TCP acknowledgements are outstanding. For a Unix-domain socket the kernel would count unread bytes. */
bool zp__sock_has_unsent(int fd)
{
	int bytes = 0;
	return !is_unix(fd) && ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

/* Milliseconds since the last TCP acknowledgement, if one is outstanding; 0 otherwise, or if the socket is not TCP. If
 * the receive window of the other end is closed, only window probes are in flight, and it answers each of them. */
uint64_t zp__sock_silence_ms(int fd)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof info;
	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0 ||
	    (info.tcpi_unacked == 0 && info.tcpi_probes < 2))
		return 0;
	return info.tcpi_last_ack_recv;
}

/* Reads TCP's counters. False: the socket is not TCP, or the kernel lacks some of them. */
bool zp__sock_flow_of(int fd, zp__sock_flow *flow)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof info;
	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0 ||
	    length < offsetof(struct tcp_info, tcpi_busy_time) + sizeof info.tcpi_busy_time)
		return false;
	/* Bytes behind a lost segment have arrived, too: else the counter would stand still until that is repaired. */
	uint64_t behind = (uint64_t)info.tcpi_sacked * info.tcpi_snd_mss;
	*flow = (zp__sock_flow){.acked_bytes = info.tcpi_bytes_acked + behind,
				.busy_us = info.tcpi_busy_time,
				.round_trip_us = info.tcpi_min_rtt,
				.smoothed_us = info.tcpi_rtt,
				.limited = !info.tcpi_delivery_rate_app_limited};
	return true;
}

uint64_t zp__now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
