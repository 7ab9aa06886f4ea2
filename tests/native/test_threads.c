/* Which thread of an engine works on which connection. */
#include <sys/socket.h>

#include "engine.h"
#include "link.h"
#include "mesh.h"

enum { THREADS = 3, LINKS = 4, CONNECTIONS = 5 };

int main(void)
{
	zp_engine_config config = {
		.thread_count = THREADS, .stall_timeout_ms = 1000, .message_bytes_max = 1, .messages_queued_bytes_max = 1};
	zp_engine *engine;
	int others[LINKS][CONNECTIONS];
	uint32_t firsts[THREADS] = {0};
	CHECK(zp_engine_open(&config, &engine) == 0);
	for (uint32_t i = 0; i < LINKS; i++) {
		int fds[CONNECTIONS], pair[2];
		for (int k = 0; k < CONNECTIONS; k++) {
			CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
			fds[k] = pair[0];
			others[i][k] = pair[1];
		}
		uint8_t id[ZP_PEER_ID_BYTES];
		uint64_t number;
		id_of(i, id);
		CHECK(zp_link_open(engine, id, fds, NULL, CONNECTIONS, &number) == 0);
		pthread_mutex_lock(&engine->mutex);
		const zp__link *link = zp__link_find(engine, id);
		for (int k = 0; k < CONNECTIONS; k++) /* Any THREADS of them in a row have all threads. */
			CHECK(link->connections[k].thread->index == (link->connections[0].thread->index + k) % THREADS);
		firsts[link->connections[0].thread->index]++;
		pthread_mutex_unlock(&engine->mutex);
	}
	for (uint32_t i = 0; i < THREADS; i++)
		CHECK(firsts[i] >= LINKS / THREADS && firsts[i] <= LINKS / THREADS + 1);
	zp_engine_close(engine);
	for (uint32_t i = 0; i < LINKS; i++)
		for (int k = 0; k < CONNECTIONS; k++)
			close(others[i][k]);
	return 0;
}
