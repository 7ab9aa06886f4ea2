/* A thread waits for its connections and for wakeups from other threads. There are two implementations: on Linux an
 * edge-triggered epoll and eventfds; elsewhere, or with ZP_POLL, poll() and pipes.
 *
 * poll() reports levels, so it is asked only about states that are not known: for example, whether a connection is
 * readable if its `readable` is false. A reported state is not asked for again until a system call contradicts it, as
 * the loop expects of an edge. Each call takes time in proportion to the number of connections of the thread.
 *
 * A waiter belongs to its thread, except that others may signal its wakeup. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine.h"
#include "link.h"
#include "wait.h"

#ifdef ZP_POLL
#include <fcntl.h>
#include <poll.h>
#else
#include <sys/epoll.h>
#include <sys/eventfd.h>
#endif

void zp__wakeup_close(zp__wakeup *wakeup)
{
	if (wakeup->read_fd >= 0)
		close(wakeup->read_fd);
	if (wakeup->write_fd >= 0 && wakeup->write_fd != wakeup->read_fd)
		close(wakeup->write_fd);
}

void zp__wakeup_signal(int write_fd)
{
	uint64_t one = 1; /* 8 bytes, as an eventfd needs; a full pipe is readable anyway */
	while (write(write_fd, &one, sizeof one) < 0 && errno == EINTR)
		;
}

void zp__wakeup_drain(int read_fd)
{
	uint64_t signals[8];
	while (read(read_fd, signals, sizeof signals) < 0 && errno == EINTR)
		;
}

#ifdef ZP_POLL

#ifndef POLLRDHUP /* Linux only */
#define POLLRDHUP 0
#endif

int zp__wakeup_open(zp__wakeup *wakeup)
{
	int ends[2] = {-1, -1};
	int rc = pipe(ends);
	for (int i = 0; rc == 0 && i < 2; i++)
		rc = fcntl(ends[i], F_SETFL, O_NONBLOCK) < 0 ? -1 : fcntl(ends[i], F_SETFD, FD_CLOEXEC);
	*wakeup = (zp__wakeup){.read_fd = ends[0], .write_fd = ends[1]};
	return rc < 0 ? -errno : 0;
}

void zp__waiter_close(zp__waiter *waiter)
{
	zp__wakeup_close(&waiter->wakeup);
	free(waiter->connections);
	free(waiter->fds);
}

static int grow(zp__waiter *waiter)
{
	uint32_t capacity = waiter->capacity ? 2 * waiter->capacity : 4;
	zp__connection **connections = calloc(capacity, sizeof *connections);
	struct pollfd *fds = calloc(capacity + 1, sizeof *fds);
	if (!connections || !fds) {
		free(connections);
		free(fds);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < waiter->count; i++)
		connections[i] = waiter->connections[i];
	free(waiter->connections);
	free(waiter->fds);
	waiter->connections = connections;
	waiter->fds = fds;
	waiter->capacity = capacity;
	return 0;
}

int zp__waiter_open(zp__waiter *waiter)
{
	*waiter = (zp__waiter){.count = 0};
	int rc = zp__wakeup_open(&waiter->wakeup);
	return rc < 0 ? rc : grow(waiter);
}

int zp__waiter_add(zp__waiter *waiter, zp__connection *connection)
{
	int rc = waiter->count == waiter->capacity ? grow(waiter) : 0;
	if (rc == 0)
		waiter->connections[waiter->count++] = connection;
	return rc;
}

void zp__waiter_remove(zp__waiter *waiter, const zp__connection *connection)
{
	uint32_t i = 0;
	while (waiter->connections[i] != connection)
		i++;
	waiter->connections[i] = waiter->connections[--waiter->count];
}

bool zp__waiter_wait(zp__waiter *waiter, int timeout_ms)
{
	struct pollfd *fds = waiter->fds;
	fds[0] = (struct pollfd){.fd = waiter->wakeup.read_fd, .events = POLLIN};
	for (uint32_t i = 0; i < waiter->count; i++) {
		const zp__connection *c = waiter->connections[i];
		int asked = (c->readable ? 0 : POLLIN) | (c->writable ? 0 : POLLOUT) | (c->hung_up ? 0 : POLLRDHUP);
		/* POLLHUP is reported each time, though it is not asked for. */
		bool known = !asked && c->hung_up;
		fds[i + 1] = (struct pollfd){.fd = known ? -1 : c->fd, .events = (short)asked};
	}
	if (poll(fds, waiter->count + 1, timeout_ms) <= 0)
		return false;
	for (uint32_t i = 0; i < waiter->count; i++) {
		int what = fds[i + 1].revents;
		if (what & (POLLHUP | POLLERR)) /* From then on nothing needs to be asked. */
			what |= POLLIN | POLLOUT | POLLRDHUP;
		if (what)
			zp__connection_ready(waiter->connections[i], what & POLLIN, what & POLLOUT,
					     what & (POLLHUP | POLLERR | POLLRDHUP));
	}
	if (fds[0].revents)
		zp__wakeup_drain(waiter->wakeup.read_fd);
	return fds[0].revents;
}

#else

#define EVENTS_PER_WAIT 64

int zp__wakeup_open(zp__wakeup *wakeup)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	*wakeup = (zp__wakeup){.read_fd = fd, .write_fd = fd};
	return fd < 0 ? -errno : 0;
}

int zp__waiter_open(zp__waiter *waiter)
{
	waiter->epoll_fd = -1;
	int rc = zp__wakeup_open(&waiter->wakeup);
	if (rc < 0)
		return rc;
	waiter->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (waiter->epoll_fd < 0)
		return -errno;
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
	return epoll_ctl(waiter->epoll_fd, EPOLL_CTL_ADD, waiter->wakeup.read_fd, &event) < 0 ? -errno : 0;
}

void zp__waiter_close(zp__waiter *waiter)
{
	zp__wakeup_close(&waiter->wakeup);
	if (waiter->epoll_fd >= 0)
		close(waiter->epoll_fd);
}

/* epoll reports at once that the socket is writable. With shared memory EPOLLOUT is left out: the socket would also
 * become writable whenever the other end reads a wakeup, which is no reason to wake this thread. */
int zp__waiter_add(zp__waiter *waiter, zp__connection *connection)
{
	uint32_t what = EPOLLIN | EPOLLRDHUP | EPOLLET | (connection->shm ? 0 : EPOLLOUT);
	struct epoll_event event = {.events = what, .data.ptr = connection};
	return epoll_ctl(waiter->epoll_fd, EPOLL_CTL_ADD, connection->fd, &event) < 0 ? -errno : 0;
}

/* close() does not remove it while a child process has the socket open. */
void zp__waiter_remove(zp__waiter *waiter, const zp__connection *connection)
{
	epoll_ctl(waiter->epoll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
}

bool zp__waiter_wait(zp__waiter *waiter, int timeout_ms)
{
	struct epoll_event events[EVENTS_PER_WAIT];
	bool woken = false;
	int n = epoll_wait(waiter->epoll_fd, events, EVENTS_PER_WAIT, timeout_ms);
	for (int i = 0; i < n; i++) {
		uint32_t what = events[i].events;
		if (events[i].data.ptr)
			zp__connection_ready(events[i].data.ptr, what & EPOLLIN, what & EPOLLOUT,
					     what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
		else
			woken = true;
	}
	if (woken)
		zp__wakeup_drain(waiter->wakeup.read_fd);
	return woken;
}
#endif
