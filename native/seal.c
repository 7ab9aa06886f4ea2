/* Sealed connections: what a connection sends and receives goes through here as records of an AEAD, so that a frame is
 * the same on sealed and other connections, and nothing that was not verified gets further than the buffer here.
 *
 *   record   length of the text (4 bytes), the text encrypted, the tag
 *   nonce    number of the record on its connection and in its direction, from 0; each direction has a key of its own
 *
 * A record that is changed, left out, repeated, moved, of the other direction or of another connection does not match
 * its tag, and ends the connection. A length that is changed makes another record of the same bytes, with the same end.
 * A stream that ends early does not complete its frame. Records are no larger than fits the caches: a record is
 * verified, then copied to where its bytes belong while it is hot.
 *
 * A key seals KEY_RECORDS records and is then replaced by what it encrypts under a nonce that no record has (as REKEY
 * of the Noise protocol framework, revision 34, 4.2), long before any of the ciphers wears out; both ends count alike.
 *
 * Sending: what was taken from the caller is sealed in `out` and counts as sent, as if the kernel had it. `out` is
 * empty before more is taken, so that a slow connection holds little but its own frame.
 *
 * Everything here belongs to the connection's thread. The functions of the cipher are the caller's and live as long as
 * the process. */
#define _GNU_SOURCE
#include "seal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "zp_internal.h"

#define NONCE_BYTES_MAX 32u
#define NONCE_BYTES_MIN 8u
#define TAG_BYTES_MAX 32u
#define KEY_RECORDS ((uint64_t)1 << 16)
#define RECORD_BYTES (ZP__RECORD_PREFIX_BYTES + ZP__RECORD_TEXT_BYTES + TAG_BYTES_MAX)
#define BUFFER_BYTES (ZP__SEAL_RECORDS * RECORD_BYTES)
/* A piece that is shorter shares a record with what follows; of longer ones nothing is copied. */
#define JOIN_BYTES_MAX 4096u

typedef struct {
	uint8_t key[ZP_SEAL_KEY_BYTES_MAX];
	uint64_t records;
} direction;

struct zp__seal {
	zp_seal cipher; /* without its keys */
	direction tx, rx;
	uint32_t out_begin, out_end; /* sealed and not sent */
	uint32_t text_begin, text_end; /* verified and not taken */
	uint32_t in_begin, in_end;     /* received and not opened */
	bool broken;		       /* a record was none: nothing is believed any more */
	uint8_t out[BUFFER_BYTES];
	uint8_t in[BUFFER_BYTES];
};

/* The pieces that a caller gives or wants, one after the other. */
typedef struct {
	const struct iovec *iov;
	int count;
	size_t done; /* of the first piece */
} pieces;

static bool pieces_left(pieces *p)
{
	while (p->count && p->done == p->iov->iov_len) {
		p->iov++;
		p->count--;
		p->done = 0;
	}
	return p->count > 0;
}

static uint8_t *piece_at(const pieces *p)
{
	return (uint8_t *)p->iov->iov_base + p->done;
}

static size_t piece_bytes(const pieces *p)
{
	return p->iov->iov_len - p->done;
}

int zp__seal_open(const zp_seal *cipher, zp__seal **result)
{
	if (!cipher->encrypt || !cipher->decrypt || cipher->key_bytes < 16 ||
	    cipher->key_bytes > ZP_SEAL_KEY_BYTES_MAX || cipher->nonce_bytes < NONCE_BYTES_MIN ||
	    cipher->nonce_bytes > NONCE_BYTES_MAX || cipher->tag_bytes < 16 || cipher->tag_bytes > TAG_BYTES_MAX)
		return -EINVAL;
	zp__seal *seal = malloc(sizeof *seal);
	if (!seal)
		return -ENOMEM;
	memset(seal, 0, offsetof(zp__seal, out));
	seal->cipher = *cipher;
	memcpy(seal->tx.key, cipher->tx_key, sizeof seal->tx.key);
	memcpy(seal->rx.key, cipher->rx_key, sizeof seal->rx.key);
	explicit_bzero(seal->cipher.tx_key, sizeof seal->cipher.tx_key);
	explicit_bzero(seal->cipher.rx_key, sizeof seal->cipher.rx_key);
	*result = seal;
	return 0;
}

void zp__seal_close(zp__seal *seal)
{
	if (!seal)
		return;
	explicit_bzero(seal, sizeof *seal); /* The text of others may be in it too. */
	free(seal);
}

static void nonce_make(uint8_t nonce[NONCE_BYTES_MAX], uint32_t bytes, uint64_t number)
{
	memset(nonce, 0, NONCE_BYTES_MAX);
	uint64_t big_endian = __builtin_bswap64(number);
	memcpy(nonce + bytes - sizeof big_endian, &big_endian, sizeof big_endian);
}

static int key_replace(const zp_seal *cipher, direction *way)
{
	static const uint8_t zeros[ZP_SEAL_KEY_BYTES_MAX];
	uint8_t nonce[NONCE_BYTES_MAX], sealed[ZP_SEAL_KEY_BYTES_MAX + TAG_BYTES_MAX];
	unsigned long long bytes;
	nonce_make(nonce, cipher->nonce_bytes, UINT64_MAX);
	int rc = cipher->encrypt(sealed, &bytes, zeros, sizeof zeros, NULL, 0, NULL, nonce, way->key);
	memcpy(way->key, sealed, sizeof way->key);
	explicit_bzero(sealed, sizeof sealed);
	return rc ? -EIO : 0;
}

/* The nonce of the next record. No nonce serves twice under a key: the number only grows. */
static int record_begin(const zp_seal *cipher, direction *way, uint8_t nonce[NONCE_BYTES_MAX])
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

/* Seals `bytes` at `text`, which may be where the record has its text. */
static int record_seal(zp__seal *seal, const uint8_t *text, uint32_t bytes)
{
	uint8_t nonce[NONCE_BYTES_MAX], *record = seal->out + seal->out_end;
	unsigned long long sealed_bytes;
	int rc = record_begin(&seal->cipher, &seal->tx, nonce);
	if (rc < 0)
		return rc;
	zp__record_encode(record, bytes);
	if (seal->cipher.encrypt(record + ZP__RECORD_PREFIX_BYTES, &sealed_bytes, text, bytes, NULL, 0, NULL, nonce,
				 seal->tx.key))
		return -EIO;
	assert(sealed_bytes == bytes + seal->cipher.tag_bytes);
	seal->out_end += ZP__RECORD_PREFIX_BYTES + (uint32_t)sealed_bytes;
	return 0;
}

/* Makes one record of the next pieces. Returns the bytes it took, or -errno. */
static ssize_t record_make(zp__seal *seal, pieces *from)
{
	const uint8_t *text = piece_at(from);
	size_t bytes = piece_bytes(from);
	if (bytes > JOIN_BYTES_MAX || from->count == 1) {
		bytes = bytes < ZP__RECORD_TEXT_BYTES ? bytes : ZP__RECORD_TEXT_BYTES;
		from->done += bytes;
	} else {
		uint8_t *joined = seal->out + seal->out_end + ZP__RECORD_PREFIX_BYTES;
		text = joined;
		bytes = 0;
		while (pieces_left(from) && bytes + piece_bytes(from) <= JOIN_BYTES_MAX) {
			memcpy(joined + bytes, piece_at(from), piece_bytes(from));
			bytes += piece_bytes(from);
			from->done += piece_bytes(from);
		}
	}
	int rc = record_seal(seal, text, (uint32_t)bytes);
	return rc < 0 ? rc : (ssize_t)bytes;
}

int zp__seal_flush(zp__connection *c)
{
	zp__seal *seal = c->seal;
	if (seal->out_begin < seal->out_end) {
		struct iovec iov = {seal->out + seal->out_begin, seal->out_end - seal->out_begin};
		ssize_t n = zp__sock_send(c->fd, &iov, 1);
		if (n == -EAGAIN || n == -EWOULDBLOCK)
			n = 0;
		if (n < 0)
			return (int)n;
		seal->out_begin += (uint32_t)n;
		if (seal->out_begin < seal->out_end) {
			c->writable = false;
			return 0;
		}
	}
	seal->out_begin = seal->out_end = 0;
	return 1;
}

ssize_t zp__seal_send(zp__connection *c, const struct iovec *iov, int count)
{
	zp__seal *seal = c->seal;
	pieces from = {iov, count, 0};
	ssize_t taken = 0;
	int rc = zp__seal_flush(c);
	while (rc > 0 && pieces_left(&from)) {
		while (pieces_left(&from) && seal->out_end + RECORD_BYTES <= BUFFER_BYTES) {
			ssize_t n = record_make(seal, &from);
			if (n < 0)
				return n;
			taken += n;
		}
		rc = zp__seal_flush(c);
	}
	return rc < 0 ? rc : taken;
}

/* Opens the next record in its place. 1: there is text; 0: the record is not complete; -EBADMSG: it is none of ours. */
static int record_open(zp__seal *seal)
{
	uint32_t have = seal->in_end - seal->in_begin, bytes;
	uint8_t *record = seal->in + seal->in_begin, *text = record + ZP__RECORD_PREFIX_BYTES;
	if (have < ZP__RECORD_PREFIX_BYTES)
		return 0;
	bytes = zp__record_decode(record);
	if (bytes < 1 || bytes > ZP__RECORD_TEXT_BYTES)
		return -EBADMSG;
	uint32_t sealed_bytes = bytes + seal->cipher.tag_bytes;
	if (have < ZP__RECORD_PREFIX_BYTES + sealed_bytes)
		return 0;
	uint8_t nonce[NONCE_BYTES_MAX];
	unsigned long long text_bytes;
	int rc = record_begin(&seal->cipher, &seal->rx, nonce);
	if (rc < 0)
		return rc;
	if (seal->cipher.decrypt(text, &text_bytes, NULL, text, sealed_bytes, NULL, 0, nonce, seal->rx.key))
		return -EBADMSG;
	assert(text_bytes == bytes);
	seal->text_begin = (uint32_t)(text - seal->in);
	seal->text_end = seal->text_begin + bytes;
	seal->in_begin += ZP__RECORD_PREFIX_BYTES + sealed_bytes;
	return 1;
}

/* Hands verified text out. Returns its bytes. */
static size_t text_take(zp__seal *seal, pieces *to)
{
	size_t taken = 0;
	while (seal->text_begin < seal->text_end && pieces_left(to)) {
		size_t bytes = seal->text_end - seal->text_begin;
		bytes = bytes < piece_bytes(to) ? bytes : piece_bytes(to);
		memcpy(piece_at(to), seal->in + seal->text_begin, bytes);
		seal->text_begin += (uint32_t)bytes;
		to->done += bytes;
		taken += bytes;
	}
	return taken;
}

/* Receives more records, when no text waits. 1: some bytes came; 0: none are there; -errno. */
static int in_fill(zp__connection *c)
{
	zp__seal *seal = c->seal;
	if (!c->readable)
		return 0;
	uint32_t kept = seal->in_end - seal->in_begin;
	memmove(seal->in, seal->in + seal->in_begin, kept);
	seal->in_begin = 0;
	seal->in_end = kept;
	struct iovec iov = {seal->in + kept, BUFFER_BYTES - kept};
	ssize_t n = zp__sock_receive(c->fd, &iov, 1);
	if (n == -EAGAIN || n == -EWOULDBLOCK) {
		c->readable = false;
		return 0;
	}
	if (n < 0)
		return (int)n;
	/* As in receive.c: the end of the stream makes no new edge. */
	if ((size_t)n < iov.iov_len && !c->hung_up)
		c->readable = false;
	seal->in_end += (uint32_t)n;
	return 1;
}

ssize_t zp__seal_receive(zp__connection *c, const struct iovec *iov, int count)
{
	zp__seal *seal = c->seal;
	pieces to = {iov, count, 0};
	ssize_t taken = 0;
	int rc = seal->broken ? -EBADMSG : 1;
	while (rc > 0) {
		taken += (ssize_t)text_take(seal, &to);
		if (!pieces_left(&to))
			break;
		rc = record_open(seal);
		seal->broken = rc < 0;
		if (rc == 0)
			rc = in_fill(c);
	}
	return taken ? taken : rc < 0 ? rc : 0; /* An error comes again. */
}
