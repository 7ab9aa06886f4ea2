/* Shared memory that carries the bytes of a connection within a host: one ring for each direction. The socket, a Unix-domain
 * one, passes the memory and wakes; that it ends is the end of the stream.
 *
 *   written, read     bytes since the connection began; what is between them is in the ring, at their value modulo its size
 *   reader_waits      the reader found the ring empty and wants to be woken
 *   writer_waits      the writer found it full and wants to be woken, once half of it is free
 *
 * Each end makes the ring that it writes, and passes it with the first byte that it sends on the socket. A later byte wakes:
 * look at both rings. Who finds a ring empty or full says so in it, looks once more, and reads the socket until that is empty,
 * so that the next byte is an edge. The other end moves its position first and looks for who waits then. All of these are
 * sequentially consistent, so one of the two sees the other. A byte for which the socket has no room is not needed:
 * there are others that the other end has not read.
 *
 * The other process may write anything to either ring at any time. So each end keeps the position that it moves to itself, takes
 * from the ring that of the other end only, and checks it against the size. What is received is copied out before
 * anybody looks at it. The memory is sealed: it does not shrink below the one who reads it, and is no file or huge page that
 * could run out when it is touched. It is not inherited by children of a fork, except one that is made while it arrives.
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
	uint64_t published;	/* of what is written, known to the other end */
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
/* Bytes without a reason that may follow each other on the socket; a few come late, when what they tell has been seen. */
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

/* Memory that nobody executes: later kernels may be set to give no other, and earlier ones do not know the flag. */
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
	do /* It fits: the other end has read what was sent before. */
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

/* Maps the ring of the other end. Huge pages are out: they would not have this size. */
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

/* Reads the socket, on which the other end wakes and passes its memory. 1: it did; -EAGAIN: it did not; -ECONNRESET: it is gone. */
static int woken(zp__connection *c)
{
	passed control;
	char bytes[256];
	struct iovec iov = {bytes, sizeof bytes};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
	ssize_t n;
	do /* There is space for one descriptor: the kernel drops others. */
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

/* Wakes the other end if it waits for what this one has just done. Where that fails the connection ends: what has been
 * written counts as sent all the same, because the other end may have read it. */
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

/* Shows the other end what is written. */
static void publish(zp__connection *c)
{
	zp__shm *shm = c->shm;
	if (shm->published == shm->written)
		return;
	shm->published = shm->written;
	atomic_store(&shm->out->written, shm->written);
	wake(c, &shm->out->reader_waits);
}

/* Bytes that may be written or, if there is no room, -EAGAIN; -errno. */
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
		if (rc > 0) /* The byte may have told of something to receive. */
			zp__connection_ready(c, true, true, false);
	}
	return -EPROTO;
}

/* Bytes that may be read or, if there are none, -EAGAIN; -errno. */
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
		c->writable |= rc > 0; /* The byte may have told of room; the turn goes on with sending. */
	}
	return -EPROTO;
}

/* How much to copy at once: of a piece of the caller's, of what the ring has from `position` on. */
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
	/* An error may be told only once, so it is not left for the next call. What was written is of an incomplete frame. */
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
