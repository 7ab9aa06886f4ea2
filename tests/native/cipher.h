/* An AEAD for tests of what is built on one: quick, keyed, with a tag over everything. It keeps nothing secret from
 * anybody who means it. */
#ifndef CIPHER_H
#define CIPHER_H

#include <stdint.h>
#include <string.h>

#include "zp_api.h"

#define CIPHER_KEY_BYTES 32u
#define CIPHER_NONCE_BYTES 12u
#define CIPHER_TAG_BYTES 16u

static inline uint64_t cipher_mix(uint64_t state, uint64_t value)
{
	state = (state ^ value) * 0x9e3779b97f4a7c15u;
	return state ^ state >> 29;
}

static inline uint64_t cipher_begin(const unsigned char *nonce, const unsigned char *key)
{
	uint64_t state = 1;
	for (uint32_t i = 0; i < CIPHER_KEY_BYTES; i++)
		state = cipher_mix(state, key[i]);
	for (uint32_t i = 0; i < CIPHER_NONCE_BYTES; i++)
		state = cipher_mix(state, nonce[i]);
	return state;
}

static inline void cipher_tag(uint8_t tag[CIPHER_TAG_BYTES], uint64_t state, const unsigned char *ciphertext, uint64_t bytes)
{
	uint64_t sum = cipher_mix(state, bytes);
	for (uint64_t i = 0; i < bytes; i++)
		sum = cipher_mix(sum, ciphertext[i] + 1u);
	uint64_t halves[2] = {sum, cipher_mix(sum, 7)};
	memcpy(tag, halves, CIPHER_TAG_BYTES);
}

static inline void cipher_stream(unsigned char *to, const unsigned char *from, uint64_t bytes, uint64_t state)
{
	for (uint64_t i = 0; i < bytes; i++)
		to[i] = from[i] ^ (uint8_t)(cipher_mix(state, i) >> 32);
}

static inline int cipher_encrypt(unsigned char *to, unsigned long long *to_bytes, const unsigned char *text,
				 unsigned long long bytes, const unsigned char *data, unsigned long long data_bytes,
				 const unsigned char *unused, const unsigned char *nonce, const unsigned char *key)
{
	(void)data, (void)data_bytes, (void)unused;
	uint64_t state = cipher_begin(nonce, key);
	cipher_stream(to, text, bytes, state);
	cipher_tag(to + bytes, state, to, bytes);
	*to_bytes = bytes + CIPHER_TAG_BYTES;
	return 0;
}

static inline int cipher_decrypt(unsigned char *text, unsigned long long *text_bytes, unsigned char *unused,
				 const unsigned char *ciphertext, unsigned long long bytes, const unsigned char *data,
				 unsigned long long data_bytes, const unsigned char *nonce, const unsigned char *key)
{
	(void)data, (void)data_bytes, (void)unused;
	uint64_t state = cipher_begin(nonce, key);
	uint8_t tag[CIPHER_TAG_BYTES];
	*text_bytes = bytes - CIPHER_TAG_BYTES;
	cipher_tag(tag, state, ciphertext, *text_bytes);
	if (memcmp(tag, ciphertext + *text_bytes, CIPHER_TAG_BYTES) != 0)
		return -1;
	cipher_stream(text, ciphertext, *text_bytes, state);
	return 0;
}

/* Cipher and keys of one end of a connection; the other end has tx and rx exchanged. */
static inline zp_aead cipher_aead(uint8_t tx, uint8_t rx)
{
	zp_aead aead = {.encrypt = cipher_encrypt,
			.decrypt = cipher_decrypt,
			.key_bytes = CIPHER_KEY_BYTES,
			.nonce_bytes = CIPHER_NONCE_BYTES,
			.tag_bytes = CIPHER_TAG_BYTES};
	memset(aead.tx_key, tx, sizeof aead.tx_key);
	memset(aead.rx_key, rx, sizeof aead.rx_key);
	return aead;
}

#endif
