/* See faults.h. State is atomic, or under watches_mutex: the engine's threads and the test call at the same time. */
#define _GNU_SOURCE
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FDS_MAX 1024
#define PIECES_MAX 64

const faults_fault faults_all[] = {
	/* First, because it is made once in a process. */
	{"pthread_atfork: ENOMEM", FAULTS_PTHREAD_ATFORK, FAULTS_FAIL, ENOMEM, FAULTS_MUST_END},
	{"malloc: none", FAULTS_MALLOC, FAULTS_FAIL, ENOMEM, FAULTS_MAY_END},
	{"calloc: none", FAULTS_CALLOC, FAULTS_FAIL, ENOMEM, FAULTS_MAY_END},
	{"mmap: none", FAULTS_MMAP, FAULTS_FAIL, ENOMEM, FAULTS_MAY_END},
	{"madvise: EINVAL", FAULTS_MADVISE, FAULTS_FAIL, EINVAL, FAULTS_HARMLESS},
	{"eventfd: EMFILE", FAULTS_EVENTFD, FAULTS_FAIL, EMFILE, FAULTS_MUST_END},
	{"epoll_create1: EMFILE", FAULTS_EPOLL_CREATE, FAULTS_FAIL, EMFILE, FAULTS_MUST_END},
	{"epoll_ctl: ENOSPC", FAULTS_EPOLL_CTL, FAULTS_FAIL, ENOSPC, FAULTS_MAY_END},
	{"epoll_wait: EINTR", FAULTS_EPOLL_WAIT, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"pipe: EMFILE", FAULTS_PIPE, FAULTS_FAIL, EMFILE, FAULTS_MUST_END},
	{"poll: EINTR", FAULTS_POLL, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"pthread_create: EAGAIN", FAULTS_PTHREAD_CREATE, FAULTS_FAIL, EAGAIN, FAULTS_MUST_END},
	{"fcntl: EBADF", FAULTS_FCNTL, FAULTS_FAIL, EBADF, FAULTS_MUST_END},
	{"fcntl of seals: EBADF", FAULTS_SEALS, FAULTS_FAIL, EBADF, FAULTS_RETRANSMITTED},
	{"memfd_create: EINVAL", FAULTS_MEMFD, FAULTS_FAIL, EINVAL, FAULTS_MAY_END},
	{"memfd_create: EMFILE", FAULTS_MEMFD, FAULTS_FAIL, EMFILE, FAULTS_MUST_END},
	{"ftruncate: ENOMEM", FAULTS_FTRUNCATE, FAULTS_FAIL, ENOMEM, FAULTS_MUST_END},
	{"fstat: EIO", FAULTS_FSTAT, FAULTS_FAIL, EIO, FAULTS_RETRANSMITTED},
	{"ioctl: ENOTTY", FAULTS_IOCTL, FAULTS_FAIL, ENOTTY, FAULTS_HARMLESS},
	{"getsockopt: ENOBUFS", FAULTS_GETSOCKOPT, FAULTS_FAIL, ENOBUFS, FAULTS_MAY_END},
	{"setsockopt: EPERM", FAULTS_SETSOCKOPT, FAULTS_FAIL, EPERM, FAULTS_HARMLESS},
	{"getsockname: ENOBUFS", FAULTS_GETSOCKNAME, FAULTS_FAIL, ENOBUFS, FAULTS_HARMLESS},
	{"getpeername: ENOTCONN", FAULTS_GETPEERNAME, FAULTS_FAIL, ENOTCONN, FAULTS_HARMLESS},
	{"read: EINTR", FAULTS_READ, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"write: EINTR", FAULTS_WRITE, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"sendmsg: EINTR", FAULTS_SENDMSG, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"sendmsg: EAGAIN", FAULTS_SENDMSG, FAULTS_FAIL, EAGAIN, FAULTS_HARMLESS},
	{"sendmsg: one byte", FAULTS_SENDMSG, FAULTS_ONE_BYTE, 0, FAULTS_HARMLESS},
	{"sendmsg: half", FAULTS_SENDMSG, FAULTS_HALF, 0, FAULTS_HARMLESS},
	{"sendmsg: ENOBUFS", FAULTS_SENDMSG, FAULTS_FAIL, ENOBUFS, FAULTS_RETRANSMITTED},
	{"sendmsg: EPIPE", FAULTS_SENDMSG, FAULTS_RESET, EPIPE, FAULTS_RETRANSMITTED},
	{"sendmsg: ECONNRESET", FAULTS_SENDMSG, FAULTS_RESET, ECONNRESET, FAULTS_RETRANSMITTED},
	{"sendmsg of a descriptor: EINTR", FAULTS_PASS, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"sendmsg of a descriptor: ETOOMANYREFS", FAULTS_PASS, FAULTS_FAIL, ETOOMANYREFS, FAULTS_MUST_END},
	{"send: EINTR", FAULTS_SEND, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"send: ENOBUFS", FAULTS_SEND, FAULTS_FAIL, ENOBUFS, FAULTS_RETRANSMITTED},
	{"send: EPIPE", FAULTS_SEND, FAULTS_RESET, EPIPE, FAULTS_RETRANSMITTED},
	{"recvmsg: EINTR", FAULTS_RECVMSG, FAULTS_FAIL, EINTR, FAULTS_HARMLESS},
	{"recvmsg: EAGAIN", FAULTS_RECVMSG, FAULTS_FAIL, EAGAIN, FAULTS_HARMLESS},
	{"recvmsg: one byte", FAULTS_RECVMSG, FAULTS_ONE_BYTE, 0, FAULTS_HARMLESS},
	{"recvmsg: half", FAULTS_RECVMSG, FAULTS_HALF, 0, FAULTS_HARMLESS},
	{"recvmsg: ENOMEM", FAULTS_RECVMSG, FAULTS_FAIL, ENOMEM, FAULTS_RETRANSMITTED},
	{"recvmsg: ECONNRESET", FAULTS_RECVMSG, FAULTS_RESET, ECONNRESET, FAULTS_RETRANSMITTED},
	{"recvmsg: end of stream", FAULTS_RECVMSG, FAULTS_END, 0, FAULTS_RETRANSMITTED},
};
const uint32_t faults_count = sizeof faults_all / sizeof *faults_all;

static const faults_fault *_Atomic armed;
static _Atomic uint64_t calls_seen, nth_call, struck;
static _Atomic uint64_t storm_seed;
static _Atomic uint32_t storm_one_in;
static atomic_bool storm_harmless;
static _Atomic int64_t blocks, mapped_bytes;
static _Atomic pid_t waiter;
static atomic_bool waiting;

/* Which epoll a socket is in, and how. A number that one thread's socket leaves may be that of another's next. */
static pthread_mutex_t watches_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
	int epoll_fd;
	bool watched;
	struct epoll_event event;
} watches[FDS_MAX];

void faults_arm(const faults_fault *fault, uint64_t nth)
{
	calls_seen = struck = 0;
	nth_call = nth;
	armed = fault;
}

void faults_storm(uint64_t seed, uint32_t one_in, bool only_harmless)
{
	calls_seen = struck = 0;
	storm_one_in = one_in;
	storm_harmless = only_harmless;
	storm_seed = seed;
}

uint64_t faults_disarm(void)
{
	armed = NULL;
	storm_seed = 0;
	return struck;
}

int64_t faults_blocks(void)
{
	return blocks;
}

int64_t faults_mapped_bytes(void)
{
	return mapped_bytes;
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static const faults_fault *storm_strike(enum faults_call call)
{
	uint64_t drawn = mix(storm_seed + 0x9e3779b97f4a7c15u * ++calls_seen);
	if (drawn % storm_one_in)
		return NULL;
	drawn = mix(drawn);
	for (uint32_t i = 0; i < faults_count; i++) { /* from a place drawn at random, the first that fits */
		const faults_fault *fault = &faults_all[(drawn + i) % faults_count];
		if (fault->call == call && (fault->outcome == FAULTS_HARMLESS || !storm_harmless)) {
			struck++;
			return fault;
		}
	}
	return NULL;
}

/* The fault that strikes this call, or NULL. */
static const faults_fault *strike(enum faults_call call)
{
	if (storm_seed)
		return storm_strike(call);
	const faults_fault *fault = armed;
	if (!fault || fault->call != call || ++calls_seen != nth_call)
		return NULL;
	struck++;
	return fault;
}

#define FAIL_IF_STRUCK(call, failure)                                                                                  \
	do {                                                                                                           \
		const faults_fault *fault = strike(call);                                                              \
		if (fault) {                                                                                           \
			errno = fault->error;                                                                          \
			return failure;                                                                                \
		}                                                                                                      \
	} while (0)

/* The wrapper of a function that fails when it is struck, and else does what it does. */
#define WRAP(type, name, parameters, arguments, call, failure)                                                         \
	type __real_##name parameters;                                                                                 \
	type __wrap_##name parameters;                                                                                 \
	type __wrap_##name parameters                                                                                  \
	{                                                                                                              \
		FAIL_IF_STRUCK(call, failure);                                                                         \
		return __real_##name arguments;                                                                        \
	}

/* --- Memory ------------------------------------------------------------------------------------------------------- */

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
	FAIL_IF_STRUCK(FAULTS_MALLOC, NULL);
	void *memory = __real_malloc(bytes);
	blocks += memory != NULL;
	return memory;
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
	FAIL_IF_STRUCK(FAULTS_CALLOC, NULL);
	void *memory = __real_calloc(count, bytes);
	blocks += memory != NULL;
	return memory;
}

void __real_free(void *memory);
void __wrap_free(void *memory);
void __wrap_free(void *memory)
{
	blocks -= memory != NULL;
	__real_free(memory);
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	FAIL_IF_STRUCK(FAULTS_MMAP, MAP_FAILED);
	void *memory = __real_mmap(at, bytes, protection, flags, fd, offset);
	mapped_bytes += memory == MAP_FAILED ? 0 : (int64_t)bytes;
	return memory;
}

int __real_munmap(void *memory, size_t bytes);
int __wrap_munmap(void *memory, size_t bytes);
int __wrap_munmap(void *memory, size_t bytes)
{
	mapped_bytes -= (int64_t)bytes;
	return __real_munmap(memory, bytes);
}

WRAP(int, madvise, (void *memory, size_t bytes, int advice), (memory, bytes, advice), FAULTS_MADVISE, -1)

/* --- Descriptors and threads -------------------------------------------------------------------------------------- */

WRAP(int, eventfd, (unsigned int value, int flags), (value, flags), FAULTS_EVENTFD, -1)
WRAP(int, epoll_create1, (int flags), (flags), FAULTS_EPOLL_CREATE, -1)

int __real_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
	FAIL_IF_STRUCK(FAULTS_EPOLL_CTL, -1);
	if (fd < FDS_MAX) {
		pthread_mutex_lock(&watches_mutex);
		watches[fd].watched = operation != EPOLL_CTL_DEL;
		watches[fd].epoll_fd = epoll_fd;
		if (event)
			watches[fd].event = *event;
		pthread_mutex_unlock(&watches_mutex);
	}
	return __real_epoll_ctl(epoll_fd, operation, fd, event);
}

int __real_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout);
int __wrap_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout);
int __wrap_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout)
{
	FAIL_IF_STRUCK(FAULTS_EPOLL_WAIT, -1);
	waiter = gettid();
	waiting = timeout != 0;
	int result = __real_epoll_wait(epoll_fd, events, count, timeout);
	waiting = false;
	return result;
}

WRAP(int, pipe, (int ends[2]), (ends), FAULTS_PIPE, -1)

/* The engine's threads wait with it, if they do not with epoll; so do tests. */
int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
	if (gettid() == getpid())
		return __real_poll(fds, count, timeout);
	FAIL_IF_STRUCK(FAULTS_POLL, -1);
	waiter = gettid();
	waiting = timeout != 0;
	int result = __real_poll(fds, count, timeout);
	waiting = false;
	return result;
}

WRAP(ssize_t, read, (int fd, void *to, size_t bytes), (fd, to, bytes), FAULTS_READ, -1)

/* A thread that an event wakes is runnable before the call that made the event returns. So who sleeps while it waits for
 * events has seen all of them. */
static bool is_idle(void)
{
	char path[64], stat[256];
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)waiter);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false; /* It has not begun. */
	ssize_t n = __real_read(fd, stat, sizeof stat - 1);
	close(fd);
	stat[n < 0 ? 0 : n] = 0;
	const char *name_end = strrchr(stat, ')');
	return waiting && name_end && name_end[1] == ' ' && name_end[2] == 'S';
}

void faults_idle_await(void)
{
	while (!is_idle())
		sched_yield();
}

WRAP(int, pthread_create,
     (pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *), void *argument),
     (thread, attributes, main, argument), FAULTS_PTHREAD_CREATE, fault->error)
WRAP(int, pthread_atfork, (void (*prepare)(void), void (*parent)(void), void (*child)(void)), (prepare, parent, child),
     FAULTS_PTHREAD_ATFORK, fault->error)

/* --- Sockets ------------------------------------------------------------------------------------------------------ */

int __real_fcntl(int fd, int command, long argument);
int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
	va_list arguments;
	va_start(arguments, command);
	long argument = va_arg(arguments, long); /* undefined, and ignored, where the command has none */
	va_end(arguments);
	FAIL_IF_STRUCK(command == F_GET_SEALS ? FAULTS_SEALS : FAULTS_FCNTL, -1);
	return __real_fcntl(fd, command, argument);
}

WRAP(int, memfd_create, (const char *name, unsigned int flags), (name, flags), FAULTS_MEMFD, -1)
WRAP(int, ftruncate, (int fd, off_t bytes), (fd, bytes), FAULTS_FTRUNCATE, -1)
WRAP(int, fstat, (int fd, struct stat *status), (fd, status), FAULTS_FSTAT, -1)
WRAP(int, ioctl, (int fd, unsigned long request, void *argument), (fd, request, argument), FAULTS_IOCTL, -1)
WRAP(int, getsockopt, (int fd, int level, int name, void *value, socklen_t *length), (fd, level, name, value, length),
     FAULTS_GETSOCKOPT, -1)
WRAP(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t length),
     (fd, level, name, value, length), FAULTS_SETSOCKOPT, -1)
WRAP(int, getsockname, (int fd, struct sockaddr *address, socklen_t *length), (fd, address, length),
     FAULTS_GETSOCKNAME, -1)
WRAP(int, getpeername, (int fd, struct sockaddr *address, socklen_t *length), (fd, address, length),
     FAULTS_GETPEERNAME, -1)
WRAP(ssize_t, write, (int fd, const void *from, size_t bytes), (fd, from, bytes), FAULTS_WRITE, -1)

/* The first `bytes` bytes of a message, in `pieces`. */
static struct msghdr cut(const struct msghdr *message, struct iovec pieces[PIECES_MAX], size_t bytes)
{
	struct msghdr result = *message;
	size_t count = 0;
	for (; count < (size_t)message->msg_iovlen && count < PIECES_MAX && bytes; count++) {
		pieces[count] = message->msg_iov[count];
		if (pieces[count].iov_len > bytes)
			pieces[count].iov_len = bytes;
		bytes -= pieces[count].iov_len;
	}
	result.msg_iov = pieces;
	result.msg_iovlen = count;
	return result;
}

static size_t bytes_of(const struct msghdr *message)
{
	size_t bytes = 0;
	for (size_t i = 0; i < (size_t)message->msg_iovlen; i++)
		bytes += message->msg_iov[i].iov_len;
	return bytes;
}

/* The edge that comes when a socket has room, or bytes, again. */
static void edge_make(int fd)
{
	if (fd >= FDS_MAX)
		return;
	pthread_mutex_lock(&watches_mutex);
	if (watches[fd].watched)
		__real_epoll_ctl(watches[fd].epoll_fd, EPOLL_CTL_MOD, fd, &watches[fd].event);
	pthread_mutex_unlock(&watches_mutex);
}

/* Does to a transfer what `fault` says. True: it is over, and `*result` its result; else it goes on with `message`. */
static bool transfer_strike(const faults_fault *fault, int fd, struct msghdr *message, struct iovec pieces[PIECES_MAX],
			    ssize_t *result)
{
	size_t bytes = bytes_of(message);
	switch (fault->effect) {
	case FAULTS_ONE_BYTE:
	case FAULTS_HALF:
		*message = cut(message, pieces, fault->effect == FAULTS_HALF && bytes > 1 ? bytes / 2 : 1);
		edge_make(fd);
		return false;
	case FAULTS_RESET:
	case FAULTS_END:
		shutdown(fd, SHUT_RDWR);
		break;
	case FAULTS_FAIL:
		if (fault->error == EAGAIN)
			edge_make(fd);
		break;
	}
	*result = fault->effect == FAULTS_END ? 0 : -1;
	errno = fault->error;
	return true;
}

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
	struct iovec pieces[PIECES_MAX];
	struct msghdr copy = *message;
	const faults_fault *fault = strike(message->msg_controllen ? FAULTS_PASS : FAULTS_SENDMSG);
	ssize_t result;
	if (fault && transfer_strike(fault, fd, &copy, pieces, &result))
		return result;
	return __real_sendmsg(fd, &copy, flags);
}

/* The engine wakes with it, one byte at a time. */
ssize_t __real_send(int fd, const void *from, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *from, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *from, size_t bytes, int flags)
{
	const faults_fault *fault = strike(FAULTS_SEND);
	if (fault && fault->effect == FAULTS_RESET)
		shutdown(fd, SHUT_RDWR);
	if (fault) {
		errno = fault->error;
		return -1;
	}
	return __real_send(fd, from, bytes, flags);
}

ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
	struct iovec pieces[PIECES_MAX];
	struct msghdr copy = *message;
	const faults_fault *fault = strike(FAULTS_RECVMSG);
	ssize_t result;
	if (fault && transfer_strike(fault, fd, &copy, pieces, &result))
		return result;
	result = __real_recvmsg(fd, &copy, flags);
	message->msg_controllen = copy.msg_controllen;
	message->msg_flags = copy.msg_flags;
	return result;
}
