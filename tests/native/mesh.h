/* Engines in one process, linked over loopback TCP. */
#ifndef MESH_H
#define MESH_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "zp_api.h"

static inline void id_of(uint32_t rank, uint8_t id[ZP_PEER_ID_BYTES])
{
	memset(id, (int)rank + 1, ZP_PEER_ID_BYTES);
}

static inline void tcp_pair(int pair[2])
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
	pair[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(pair[0], (struct sockaddr *)&address, length) == 0);
	pair[1] = accept(listener, NULL, NULL);
	CHECK(pair[1] >= 0);
	close(listener);
}

/* Links the engines of two ranks by `count` connections that are not encrypted. */
static inline void engines_link(zp_engine *engines[2], const uint32_t ranks[2], uint32_t count)
{
	int fds[2][ZP_LINK_CONNECTIONS_MAX], pair[2];
	CHECK(count <= ZP_LINK_CONNECTIONS_MAX);
	for (uint32_t i = 0; i < count; i++) {
		tcp_pair(pair);
		fds[0][i] = pair[0];
		fds[1][i] = pair[1];
	}
	for (int end = 0; end < 2; end++) {
		uint8_t id[ZP_PEER_ID_BYTES];
		uint64_t link;
		id_of(ranks[1 - end], id);
		CHECK(zp_link_open(engines[end], id, fds[end], NULL, count, &link) == 0);
	}
}

#endif
