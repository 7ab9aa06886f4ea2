/* The record layer of encrypted connections, below the frames: it sends the byte stream of a connection as records of
 * an AEAD. Frames look the same on encrypted and plain connections, and unverified bytes never leave the buffer here.
 *
 *   record   length of the plaintext (4 bytes), ciphertext, tag
 *   nonce    sequence number of the record on its connection and in its direction, from 0; each direction has its key
 *
 * A record that was changed, left out, repeated or reordered, or comes from the other direction or another connection,
 * fails verification, which ends the connection. So does one whose length was changed. A truncated stream leaves its
 * last frame incomplete. Records fit the CPU caches: each is verified, then copied to its destination while it is
 * there.
 *
 * After KEY_RECORDS records, far below the usage limits of the ciphers, a key is replaced by its encryption of zeros
 * under a nonce that no record uses (like REKEY of the Noise protocol framework, revision 34, 4.2). Both ends count
 * records, so they change keys at the same record.
 *
 * Sending: bytes consumed from the caller are encrypted to `out` and count as sent, as if the kernel had them. `out` is
 * emptied before more is consumed, so that a slow connection holds back little more than its own frame.
 *
 * Everything here belongs to the connection's thread. The caller owns the functions of the cipher; they stay valid
 * until the process ends. */
#define _GNU_SOURCE
#include "record.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "bounds.h"
#include "link.h"
#include "pieces.h"

#define NONCE_BYTES_MAX 32u
#define NONCE_BYTES_MIN 8u
#define TAG_BYTES_MAX 32u
#define KEY_RECORDS ((uint64_t)1 << 16)
#define RECORD_BYTES (ZP__RECORD_PREFIX_BYTES + ZP__RECORD_PLAINTEXT_BYTES + TAG_BYTES_MAX)
#define BUFFER_BYTES (ZP__RECORDS_BUFFERED * RECORD_BYTES)
/* A shorter piece is copied and shares a record with the next piece; a longer one is encrypted from where it is. */
#define JOIN_BYTES_MAX 4096u

typedef struct {
	uint8_t key[ZP_AEAD_KEY_BYTES_MAX];
	uint64_t records;
} direction;

struct zp__record_layer {
	zp_aead cipher; /* its keys are wiped; `tx` and `rx` have them */
	direction tx, rx;
	uint32_t out_begin, out_end;   /* in `out`: encrypted, not sent */
	uint32_t text_begin, text_end; /* in `in`: verified, not consumed */
	uint32_t in_begin, in_end;     /* in `in`: received, not decrypted */
	bool broken;		       /* a record failed verification: everything after it is refused */
	uint8_t out[BUFFER_BYTES];
	uint8_t in[BUFFER_BYTES];
};

int zp__record_layer_open(const zp_aead *cipher, zp__record_layer **result)
{
	if (!cipher->encrypt || !cipher->decrypt || cipher->key_bytes < 16 ||
	    cipher->key_bytes > ZP_AEAD_KEY_BYTES_MAX || cipher->nonce_bytes < NONCE_BYTES_MIN ||
	    cipher->nonce_bytes > NONCE_BYTES_MAX || cipher->tag_bytes < 16 || cipher->tag_bytes > TAG_BYTES_MAX)
		return -EINVAL;
	zp__record_layer *layer = malloc(sizeof *layer);
	if (!layer)
		return -ENOMEM;
	memset(layer, 0, offsetof(zp__record_layer, out));
	layer->cipher = *cipher;
	memcpy(layer->tx.key, cipher->tx_key, sizeof layer->tx.key);
	memcpy(layer->rx.key, cipher->rx_key, sizeof layer->rx.key);
	explicit_bzero(layer->cipher.tx_key, sizeof layer->cipher.tx_key);
	explicit_bzero(layer->cipher.rx_key, sizeof layer->cipher.rx_key);
	*result = layer;
	return 0;
}

void zp__record_layer_close(zp__record_layer *layer)
{
	if (!layer)
		return;
	explicit_bzero(layer, sizeof *layer); /* It holds keys and plaintext. */
	free(layer);
}

static void nonce_make(uint8_t nonce[NONCE_BYTES_MAX], uint32_t bytes, uint64_t number)
{
	memset(nonce, 0, NONCE_BYTES_MAX);
	uint64_t big_endian = __builtin_bswap64(number);
	memcpy(nonce + bytes - sizeof big_endian, &big_endian, sizeof big_endian);
}

static int key_replace(const zp_aead *cipher, direction *way)
{
	static const uint8_t zeros[ZP_AEAD_KEY_BYTES_MAX];
	uint8_t nonce[NONCE_BYTES_MAX], output[ZP_AEAD_KEY_BYTES_MAX + TAG_BYTES_MAX];
	unsigned long long bytes;
	nonce_make(nonce, cipher->nonce_bytes, UINT64_MAX);
	int rc = cipher->encrypt(output, &bytes, zeros, sizeof zeros, NULL, 0, NULL, nonce, way->key);
	memcpy(way->key, output, sizeof way->key);
	explicit_bzero(output, sizeof output);
	return rc ? -EIO : 0;
}

/* Makes the nonce of the next record. A nonce is never reused under a key: the sequence number only grows. */
static int record_begin(const zp_aead *cipher, direction *way, uint8_t nonce[NONCE_BYTES_MAX])
{
	if (way->records && way->records % KEY_RECORDS == 0) {
		int rc = key_replace(cipher, way);
		if (rc < 0)
			return rc;
	}
	if (way->records >= UINT64_MAX / 2)
		return -EOVERFLOW;
	nonce_make(nonce, cipher->nonce_bytes, way->records++);
	return 0;
}

/* Encrypts `bytes` at `text` into the next record of `out`. `text` may point to the plaintext position of that record. */
static int record_encrypt(zp__record_layer *layer, const uint8_t *text, uint32_t bytes)
{
	uint8_t nonce[NONCE_BYTES_MAX], *record = layer->out + layer->out_end;
	unsigned long long ciphertext_bytes;
	int rc = record_begin(&layer->cipher, &layer->tx, nonce);
	if (rc < 0)
		return rc;
	zp__record_encode(record, bytes);
	if (layer->cipher.encrypt(record + ZP__RECORD_PREFIX_BYTES, &ciphertext_bytes, text, bytes, NULL, 0, NULL, nonce,
				 layer->tx.key))
		return -EIO;
	assert(ciphertext_bytes == bytes + layer->cipher.tag_bytes);
	layer->out_end += ZP__RECORD_PREFIX_BYTES + (uint32_t)ciphertext_bytes;
	return 0;
}

/* Makes one record of the next pieces. Returns the bytes consumed, or -errno. */
static ssize_t record_make(zp__record_layer *layer, zp__pieces *from)
{
	const uint8_t *text = zp__piece_at(from);
	size_t bytes = zp__piece_bytes(from);
	if (bytes > JOIN_BYTES_MAX || from->count == 1) {
		bytes = bytes < ZP__RECORD_PLAINTEXT_BYTES ? bytes : ZP__RECORD_PLAINTEXT_BYTES;
		from->done += bytes;
	} else {
		uint8_t *joined = layer->out + layer->out_end + ZP__RECORD_PREFIX_BYTES;
		text = joined;
		bytes = 0;
		while (zp__pieces_left(from) && bytes + zp__piece_bytes(from) <= JOIN_BYTES_MAX) {
			memcpy(joined + bytes, zp__piece_at(from), zp__piece_bytes(from));
			bytes += zp__piece_bytes(from);
			from->done += zp__piece_bytes(from);
		}
	}
	int rc = record_encrypt(layer, text, (uint32_t)bytes);
	return rc < 0 ? rc : (ssize_t)bytes;
}

int zp__record_flush(zp__connection *c)
{
	zp__record_layer *layer = c->records;
	if (layer->out_begin < layer->out_end) {
		struct iovec iov = {layer->out + layer->out_begin, layer->out_end - layer->out_begin};
		ssize_t n = zp__connection_send(c, &iov, 1);
		if (n == -EAGAIN || n == -EWOULDBLOCK)
			n = 0;
		if (n < 0)
			return (int)n;
		layer->out_begin += (uint32_t)n;
		if (layer->out_begin < layer->out_end) {
			c->writable = false;
			return 0;
		}
	}
	layer->out_begin = layer->out_end = 0;
	return 1;
}

ssize_t zp__record_send(zp__connection *c, const struct iovec *iov, int count)
{
	zp__record_layer *layer = c->records;
	zp__pieces from = {iov, count, 0};
	ssize_t taken = 0;
	int rc = zp__record_flush(c);
	while (rc > 0 && zp__pieces_left(&from)) {
		while (zp__pieces_left(&from) && layer->out_end + RECORD_BYTES <= BUFFER_BYTES) {
			ssize_t n = record_make(layer, &from);
			if (n < 0)
				return n;
			taken += n;
		}
		rc = zp__record_flush(c);
	}
	return rc < 0 ? rc : taken;
}

/* Decrypts the next record in its buffer. 1: plaintext is available; 0: the record is incomplete; -EBADMSG: it fails
 * verification. */
static int record_decrypt(zp__record_layer *layer)
{
	uint32_t have = layer->in_end - layer->in_begin, bytes;
	uint8_t *record = layer->in + layer->in_begin, *text = record + ZP__RECORD_PREFIX_BYTES;
	if (have < ZP__RECORD_PREFIX_BYTES)
		return 0;
	bytes = zp__record_decode(record);
	if (bytes < 1 || bytes > ZP__RECORD_PLAINTEXT_BYTES)
		return -EBADMSG;
	uint32_t ciphertext_bytes = bytes + layer->cipher.tag_bytes;
	if (have < ZP__RECORD_PREFIX_BYTES + ciphertext_bytes)
		return 0;
	uint8_t nonce[NONCE_BYTES_MAX];
	unsigned long long text_bytes;
	int rc = record_begin(&layer->cipher, &layer->rx, nonce);
	if (rc < 0)
		return rc;
	if (layer->cipher.decrypt(text, &text_bytes, NULL, text, ciphertext_bytes, NULL, 0, nonce, layer->rx.key))
		return -EBADMSG;
	assert(text_bytes == bytes);
	layer->text_begin = (uint32_t)(text - layer->in);
	layer->text_end = layer->text_begin + bytes;
	layer->in_begin += ZP__RECORD_PREFIX_BYTES + ciphertext_bytes;
	return 1;
}

/* Copies verified plaintext to the caller. Returns the number of bytes. */
static size_t text_take(zp__record_layer *layer, zp__pieces *to)
{
	size_t taken = 0;
	while (layer->text_begin < layer->text_end && zp__pieces_left(to)) {
		size_t bytes = layer->text_end - layer->text_begin;
		bytes = bytes < zp__piece_bytes(to) ? bytes : zp__piece_bytes(to);
		memcpy(zp__piece_at(to), layer->in + layer->text_begin, bytes);
		layer->text_begin += (uint32_t)bytes;
		to->done += bytes;
		taken += bytes;
	}
	return taken;
}

/* Receives more bytes of records; no plaintext may be left. 1: received some; 0: the socket is empty; -errno. */
static int in_fill(zp__connection *c)
{
	zp__record_layer *layer = c->records;
	if (!c->readable)
		return 0;
	uint32_t kept = layer->in_end - layer->in_begin;
	memmove(layer->in, layer->in + layer->in_begin, kept);
	layer->in_begin = 0;
	layer->in_end = kept;
	struct iovec iov = {layer->in + kept, BUFFER_BYTES - kept};
	ssize_t n = zp__connection_receive(c, &iov, 1);
	if (n == -EAGAIN || n == -EWOULDBLOCK) {
		c->readable = false;
		return 0;
	}
	if (n < 0)
		return (int)n;
	/* As in receive.c: the end of the stream triggers no new edge. */
	if ((size_t)n < iov.iov_len && !c->hung_up)
		c->readable = false;
	layer->in_end += (uint32_t)n;
	return 1;
}

ssize_t zp__record_receive(zp__connection *c, const struct iovec *iov, int count)
{
	zp__record_layer *layer = c->records;
	zp__pieces to = {iov, count, 0};
	ssize_t taken = 0;
	int rc = layer->broken ? -EBADMSG : 1;
	while (rc > 0) {
		taken += (ssize_t)text_take(layer, &to);
		if (!zp__pieces_left(&to))
			break;
		rc = record_decrypt(layer);
		layer->broken = rc < 0;
		if (rc == 0)
			rc = taken ? 0 : in_fill(c); /* At most once per call: records of one byte each take long. */
	}
	return taken ? taken : rc < 0 ? rc : 0; /* After `taken` bytes the next call returns the error. */
}
