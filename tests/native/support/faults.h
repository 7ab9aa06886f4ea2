/* A shim between the engine and the C library, put there by the linker (--wrap): it counts the calls that can fail, makes
 * chosen ones fail as the kernel might, and keeps account of memory that was taken and not given back.
 *
 * It works on the calls of the whole program but for those of the C library itself, and for poll() in the first thread;
 * tests take their own memory before they arm it. Where a fault tells the engine that a socket is empty or full although
 * it is not, the edge that the kernel would report later is made at once, by telling epoll of the socket again. */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdbool.h>
#include <stdint.h>

enum faults_call {
	FAULTS_MALLOC,
	FAULTS_CALLOC,
	FAULTS_MMAP,
	FAULTS_MADVISE,
	FAULTS_EVENTFD,
	FAULTS_EPOLL_CREATE,
	FAULTS_EPOLL_CTL,
	FAULTS_EPOLL_WAIT,
	FAULTS_PIPE,
	FAULTS_POLL,
	FAULTS_PTHREAD_CREATE,
	FAULTS_PTHREAD_ATFORK,
	FAULTS_FCNTL,
	FAULTS_SEALS, /* fcntl() with F_GET_SEALS */
	FAULTS_MEMFD,
	FAULTS_FTRUNCATE,
	FAULTS_FSTAT,
	FAULTS_IOCTL,
	FAULTS_GETSOCKOPT,
	FAULTS_SETSOCKOPT,
	FAULTS_GETSOCKNAME,
	FAULTS_GETPEERNAME,
	FAULTS_READ,
	FAULTS_WRITE,
	FAULTS_SENDMSG,
	FAULTS_PASS, /* sendmsg() with a descriptor */
	FAULTS_SEND,
	FAULTS_RECVMSG,
	FAULTS_CALLS
};

enum faults_effect {
	FAULTS_FAIL,	 /* the call does nothing and fails with `error` */
	FAULTS_ONE_BYTE, /* of a transfer */
	FAULTS_HALF,	 /* of a transfer */
	FAULTS_RESET,	 /* the socket is shut down both ways, then as FAULTS_FAIL */
	FAULTS_END	 /* the socket is shut down both ways, the call returns 0 */
};

enum faults_outcome {
	FAULTS_HARMLESS, /* work goes on as if nothing had happened */
	FAULTS_RETRANSMITTED,	 /* a connection is lost; work goes on where the link has another */
	FAULTS_MAY_END,	 /* work may end with an error */
	FAULTS_MUST_END	 /* there is no going on: somebody must be told */
};

typedef struct {
	const char *name;
	enum faults_call call;
	enum faults_effect effect;
	int error;
	enum faults_outcome outcome;
} faults_fault;

/* Every fault that the shim can make. */
extern const faults_fault faults_all[];
extern const uint32_t faults_count;

/* From now on the `nth` call, counted from 1, that `fault` is about fails. */
void faults_arm(const faults_fault *fault, uint64_t nth);

/* From now on about one in `one_in` of the calls of any kind fails, drawn from `seed`; only in harmless ways, or in all. */
void faults_storm(uint64_t seed, uint32_t one_in, bool only_harmless);

/* Ends both. Returns how many calls failed since. */
uint64_t faults_disarm(void);

/* Waits until the thread of the only engine, which must have one, has done all that it can and sleeps. */
void faults_idle_await(void);

/* What the program holds now: blocks of malloc and calloc, and mapped bytes. */
int64_t faults_blocks(void);
int64_t faults_mapped_bytes(void);

#endif
