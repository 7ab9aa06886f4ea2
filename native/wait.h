/* The waiter of a thread, and its wakeup; see wait.c. */
#ifndef ZP_WAIT_H
#define ZP_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#ifndef __linux__
#define ZP_POLL
#endif

struct pollfd;
typedef struct zp__connection zp__connection;

/* Makes a descriptor readable. -1: none. */
typedef struct {
	int read_fd, write_fd; /* the ends of a pipe, or an eventfd twice */
} zp__wakeup;

/* Belongs to its thread, but others may signal its wakeup. */
typedef struct {
	zp__wakeup wakeup;
#ifdef ZP_POLL
	zp__connection **connections;
	struct pollfd *fds; /* of the wakeup and the connections */
	uint32_t count, capacity;
#else
	int epoll_fd;
#endif
} zp__waiter;

/* If opening fails, the caller closes what was opened. */
int zp__wakeup_open(zp__wakeup *wakeup);
void zp__wakeup_close(zp__wakeup *wakeup);
void zp__wakeup_signal(int write_fd);
void zp__wakeup_drain(int read_fd);
int zp__waiter_open(zp__waiter *waiter);
void zp__waiter_close(zp__waiter *waiter);
int zp__waiter_add(zp__waiter *waiter, zp__connection *connection);
void zp__waiter_remove(zp__waiter *waiter, const zp__connection *connection);
/* Calls zp__connection_ready() for each connection on which something happened. Returns true if it was woken. */
bool zp__waiter_wait(zp__waiter *waiter, int timeout_ms);

#endif
