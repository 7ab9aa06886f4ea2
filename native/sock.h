/* Sockets, and the clock; see sock.c. */
#ifndef ZP_SOCK_H
#define ZP_SOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct iovec;

/* TCP's counters of a connection. */
typedef struct {
	uint64_t acked_bytes;
	uint64_t busy_us;	/* time with data to send, or not acknowledged */
	uint32_t round_trip_us; /* minimum of the recent ones; UINT32_MAX: not known */
	uint32_t smoothed_us;	/* that of the last packets */
	bool limited;		/* at its last sample, it always had more to send than the path took */
} zp__sock_flow;

int zp__sock_prepare(int fd, uint32_t path_timeout_ms);
bool zp__sock_is_local(int fd);
uint64_t zp__sock_silence_ms(int fd);
ssize_t zp__sock_send(int fd, struct iovec *iov, int count);
ssize_t zp__sock_receive(int fd, struct iovec *iov, int count);
bool zp__sock_has_unsent(int fd);
bool zp__sock_flow_of(int fd, zp__sock_flow *flow);
uint64_t zp__now_ns(void);

#endif
