/* Shared memory that carries the bytes of a connection within a host: one ring for each direction. The socket is a
 * Unix-domain one: it passes the memory and wakes the other end, and the stream ends when it ends.
 *
 *   written, read     bytes since the connection began; those between them are in the ring, at value modulo its size
 *   reader_waits      the reader found the ring empty and wants to be woken
 *   writer_waits      the writer found it full and wants to be woken, once half of it is free
 *
 * Each end makes the ring that it writes, and passes it with the first byte that it sends on the socket. Every later
 * byte is a wakeup: look at both rings. An end that finds a ring empty or full sets its flag in the ring, looks once
 * more, and reads the socket until it is empty, so that the next byte is an edge. The other end first moves its
 * position and then reads the flag. All these accesses are sequentially consistent, so at least one of the two ends
 * sees the other's write. If the socket has no room for a wakeup, none is needed: the other end has unread bytes there.
 *
 * The other process may write anything to either ring at any time. So each end keeps its own position outside the ring,
 * takes only the other end's position from the ring, and checks it against the size. Received bytes are copied out
 * before anybody looks at them. The memory is sealed: it cannot shrink under its reader, and it is not a file or a huge
 * page, which could run out when it is touched. Forked children do not inherit it, except one that is forked while it
 * arrives.
 *
 * Everything but zp__shm_open() and zp__shm_close() belongs to the connection's thread. */
#define _GNU_SOURCE
#include "shm.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bounds.h"
#include "engine.h"
#include "link.h"
#include "pieces.h"

typedef struct {
	_Alignas(64) _Atomic uint64_t written;
	_Atomic uint32_t reader_waits;
	_Alignas(64) _Atomic uint64_t read;
	_Atomic uint32_t writer_waits;
	_Alignas(4096) uint8_t bytes[ZP__SHM_RING_BYTES];
} ring;

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock would be in one process only");

struct zp__shm {
	ring *out;		/* constant */
	ring *in;		/* NULL until the other end has passed it */
	uint64_t written, read; /* positions of this end */
	uint64_t published;	/* position up to which the other end knows what is written */
};

#ifdef ZP_POLL

int zp__shm_open(int fd, zp__shm **shm)
{
	(void)fd;
	*shm = NULL;
	return 0;
}

void zp__shm_close(zp__shm *shm)
{
	assert(!shm);
}

ssize_t zp__shm_send(zp__connection *c, const struct iovec *iov, int count)
{
	(void)c, (void)iov, (void)count;
	return -ENOSYS;
}

ssize_t zp__shm_receive(zp__connection *c, const struct iovec *iov, int count)
{
	(void)c, (void)iov, (void)count;
	return -ENOSYS;
}

#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 8u
#endif
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define PIECE_BYTES (64u << 10) /* copied at a time: the other end may begin with it */
/* Wakeups without a reason that may follow each other; a few come late, when their reason has been seen already. */
#define IDLE_WAKES_MAX 16

typedef union {
	struct cmsghdr header;
	char bytes[CMSG_SPACE(sizeof(int))];
} passed;

static int ring_map(int memory, ring **to)
{
	ring *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	if (r == MAP_FAILED)
		return -errno;
	(void)madvise(r, sizeof *r, MADV_DONTFORK);
	*to = r;
	return 0;
}

/* Memory that nobody can execute: later kernels may be set to give no other, and earlier ones do not know the flag. */
static int memory_new(void)
{
	int memory = memfd_create("zpccl", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (memory < 0 && errno == EINVAL)
		memory = memfd_create("zpccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return memory;
}

static int memory_pass(int fd, int memory)
{
	passed control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof memory)}};
	memcpy(CMSG_DATA(&control.header), &memory, sizeof memory);
	char byte = 0;
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n;
	do /* It fits: the other end has read all earlier bytes. */
		n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

int zp__shm_open(int fd, zp__shm **result)
{
	*result = NULL;
	int domain;
	socklen_t length = sizeof domain;
	if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) < 0)
		return -errno;
	if (domain != AF_UNIX)
		return 0;
	zp__shm *shm = calloc(1, sizeof *shm);
	if (!shm)
		return -ENOMEM;
	int memory = memory_new();
	int rc = memory < 0 || ftruncate(memory, sizeof(ring)) < 0 || fcntl(memory, F_ADD_SEALS, SEALS) < 0 ? -errno : 0;
	if (rc == 0)
		rc = ring_map(memory, &shm->out);
	if (rc == 0)
		rc = memory_pass(fd, memory);
	if (memory >= 0)
		close(memory);
	if (rc == 0)
		*result = shm;
	else
		zp__shm_close(shm);
	return rc;
}

void zp__shm_close(zp__shm *shm)
{
	if (!shm)
		return;
	if (shm->out)
		munmap(shm->out, sizeof *shm->out);
	if (shm->in)
		munmap(shm->in, sizeof *shm->in);
	free(shm);
}

/* Maps the ring of the other end. Its size excludes huge pages. */
static int memory_take(zp__shm *shm, int memory)
{
	struct stat status;
	if (shm->in)
		return -EPROTO;
	int seals = fcntl(memory, F_GET_SEALS);
	if (seals < 0 || fstat(memory, &status) < 0)
		return errno == EINVAL ? -EPROTO : -errno; /* EINVAL: a descriptor of another kind */
	if ((seals & SEALS) != SEALS || status.st_size != sizeof(ring))
		return -EPROTO;
	return ring_map(memory, &shm->in);
}

/* Reads the socket, on which the other end sends wakeups and its memory. 1: something came; -EAGAIN: nothing;
 * -ECONNRESET: the other end is gone. */
static int woken(zp__connection *c)
{
	passed control;
	char bytes[256];
	struct iovec iov = {bytes, sizeof bytes};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
	ssize_t n;
	do /* There is space for one descriptor: the kernel drops more. */
		n = recvmsg(c->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return n == 0 ? -ECONNRESET : -errno;
	if (!CMSG_FIRSTHDR(&message)) {
		int without = message.msg_flags & MSG_CTRUNC ? -EMFILE /* for the one that came */ : -EPROTO;
		return c->shm->in ? 1 : without;
	}
	int memory = -1, rc = -EPROTO;
	if (control.header.cmsg_type == SCM_RIGHTS) {
		memcpy(&memory, CMSG_DATA(&control.header), sizeof memory);
		rc = memory_take(c->shm, memory);
		close(memory);
	}
	return rc < 0 ? rc : 1;
}

/* Wakes the other end if it waits for what this end has just done. If that fails the connection ends, and no error is
 * returned: the written bytes must count as sent, because the other end may have read them. */
static void wake(zp__connection *c, _Atomic uint32_t *waits)
{
	if (!atomic_load(waits) || !atomic_exchange(waits, 0))
		return;
	ssize_t n;
	do
		n = send(c->fd, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	if (n < 0 && errno != EAGAIN)
		shutdown(c->fd, SHUT_RDWR);
}

/* Makes the written bytes visible to the other end. */
static void publish(zp__connection *c)
{
	zp__shm *shm = c->shm;
	if (shm->published == shm->written)
		return;
	shm->published = shm->written;
	atomic_store(&shm->out->written, shm->written);
	wake(c, &shm->out->reader_waits);
}

/* Number of bytes that may be written; -EAGAIN: there is no room; -errno. */
static ssize_t room(zp__connection *c)
{
	zp__shm *shm = c->shm;
	for (int wakes = 0; wakes < IDLE_WAKES_MAX; wakes++) {
		uint64_t used = shm->written - atomic_load(&shm->out->read);
		if (used < ZP__SHM_RING_BYTES)
			return (ssize_t)(ZP__SHM_RING_BYTES - used);
		if (used > ZP__SHM_RING_BYTES)
			return -EPROTO;
		publish(c);
		atomic_store(&shm->out->writer_waits, 1);
		int rc = atomic_load(&shm->out->read) == shm->written - used ? woken(c) : 0;
		if (rc < 0)
			return rc;
		if (rc > 0) /* The wakeup may mean that there is something to receive. */
			zp__connection_ready(c, true, true, false);
	}
	return -EPROTO;
}

/* Number of bytes that may be read; -EAGAIN: there are none; -errno. */
static ssize_t available(zp__connection *c)
{
	zp__shm *shm = c->shm;
	for (int wakes = 0; wakes < IDLE_WAKES_MAX; wakes++) {
		uint64_t bytes = shm->in ? atomic_load(&shm->in->written) - shm->read : 0;
		if (bytes > ZP__SHM_RING_BYTES)
			return -EPROTO;
		if (bytes)
			return (ssize_t)bytes;
		if (shm->in)
			atomic_store(&shm->in->reader_waits, 1);
		int rc = !shm->in || atomic_load(&shm->in->written) == shm->read ? woken(c) : 0;
		if (rc == -ECONNRESET && shm->in && atomic_load(&shm->in->written) != shm->read)
			rc = 0; /* The last bytes came between the two looks. */
		if (rc < 0)
			return rc;
		c->writable |= rc > 0; /* The wakeup may mean that there is room; the turn goes on with sending. */
	}
	return -EPROTO;
}

/* How many bytes to copy at once: no more than the caller's piece has, and the ring from `position` to its end. */
static size_t stretch(const zp__pieces *pieces, ssize_t in_ring, uint64_t position)
{
	size_t bytes = zp__piece_bytes(pieces), to_end = ZP__SHM_RING_BYTES - position % ZP__SHM_RING_BYTES;
	bytes = bytes < (size_t)in_ring ? bytes : (size_t)in_ring;
	bytes = bytes < to_end ? bytes : to_end;
	return bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
}

ssize_t zp__shm_send(zp__connection *c, const struct iovec *iov, int count)
{
	zp__shm *shm = c->shm;
	zp__pieces from = {iov, count, 0};
	ssize_t sent = 0, free_bytes = 0;
	while (zp__pieces_left(&from) && (free_bytes = room(c)) > 0) {
		size_t bytes = stretch(&from, free_bytes, shm->written);
		memcpy(shm->out->bytes + shm->written % ZP__SHM_RING_BYTES, zp__piece_at(&from), bytes);
		from.done += bytes;
		sent += (ssize_t)bytes;
		shm->written += bytes;
		if (shm->written - shm->published >= PIECE_BYTES)
			publish(c);
	}
	publish(c);
	/* An error may be reported only once, so it is not left for the next call. The bytes written are an incomplete
	 * frame. */
	return sent && (free_bytes > 0 || free_bytes == -EAGAIN) ? sent : free_bytes;
}

ssize_t zp__shm_receive(zp__connection *c, const struct iovec *iov, int count)
{
	zp__shm *shm = c->shm;
	zp__pieces to = {iov, count, 0};
	ssize_t received = 0, ready_bytes = 0;
	while (zp__pieces_left(&to) && (ready_bytes = available(c)) > 0) {
		size_t bytes = stretch(&to, ready_bytes, shm->read);
		memcpy(zp__piece_at(&to), shm->in->bytes + shm->read % ZP__SHM_RING_BYTES, bytes);
		to.done += bytes;
		received += (ssize_t)bytes;
		shm->read += bytes;
		atomic_store(&shm->in->read, shm->read);
		if ((size_t)ready_bytes - bytes <= ZP__SHM_RING_BYTES / 2)
			wake(c, &shm->in->writer_waits);
	}
	return received ? received : ready_bytes;
}

#endif

int zp_shared_memory_check(int fd)
{
	zp__shm *shm;
	int rc = zp__shm_open(fd, &shm);
	zp__shm_close(shm);
	return rc;
}
