/* Runs a fuzz target without a fuzzer: on every file of a directory, then on inputs made from them by a fixed number of
 * seeds, the same in every run. What fails says which; the seed can be given to replay it alone.
 *
 *   fuzz_frame DIRECTORY [SEEDS [FIRST_SEED]] */
#define _GNU_SOURCE
#include "fuzz.h"

#include <dirent.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "../check.h"

enum { FILES_MAX = 1000, INPUT_BYTES_MAX = 4096, EDITS_MAX = 8, SEEDS = 3000 };

typedef struct {
	size_t bytes;
	uint8_t data[INPUT_BYTES_MAX];
} input;

static input files[FILES_MAX], edited;
static uint32_t file_count;
static char running[2 * PATH_MAX];

static void say_what_failed(void)
{
	if (*running && write(2, running, strlen(running)) < 0)
		_exit(2);
}

static void on_signal(int number)
{
	say_what_failed();
	signal(number, SIG_DFL);
	raise(number);
}

static void file_read(const char *path)
{
	FILE *file = fopen(path, "rb");
	CHECK(file && file_count < FILES_MAX);
	input *in = &files[file_count++];
	in->bytes = fread(in->data, 1, sizeof in->data, file);
	CHECK(fgetc(file) == EOF); /* Longer ones do not belong in the corpus. */
	fclose(file);
}

static void run(const input *in)
{
	uint8_t *copy = malloc(in->bytes); /* Its own block, so that AddressSanitizer sees who reads past the end. */
	CHECK(copy || !in->bytes);
	if (in->bytes)
		memcpy(copy, in->data, in->bytes);
	LLVMFuzzerTestOneInput(copy, in->bytes);
	free(copy);
}

static void run_files(const char *directory)
{
	struct dirent **names;
	int count = scandir(directory, &names, NULL, alphasort); /* in the same order everywhere */
	CHECK(count > 0);
	for (int i = 0; i < count; i++) {
		if (names[i]->d_name[0] != '.') {
			char path[PATH_MAX];
			snprintf(path, sizeof path, "%s/%s", directory, names[i]->d_name);
			snprintf(running, sizeof running, "failed: %s\n", path);
			file_read(path);
			run(&files[file_count - 1]);
		}
		free(names[i]);
	}
	free(names);
}

static void edit(uint64_t *random)
{
	static const uint8_t telling[] = {0, 1, 2, 4, 39, 40, 41, 127, 128, 255};
	size_t at = edited.bytes ? random_next(random) % edited.bytes : 0, n = random_next(random) % 64;
	switch (random_next(random) % 6) {
	case 0: /* one byte */
		edited.data[at] = (uint8_t)random_next(random);
		break;
	case 1:
		edited.data[at] = telling[random_next(random) % sizeof telling];
		break;
	case 2: /* one bit */
		edited.data[at] ^= (uint8_t)(1u << random_next(random) % 8);
		break;
	case 3: /* cut out */
		n = n < edited.bytes - at ? n : edited.bytes - at;
		memmove(edited.data + at, edited.data + at + n, edited.bytes - at - n);
		edited.bytes -= n;
		break;
	case 4: /* twice */
		n = n < edited.bytes - at ? n : edited.bytes - at;
		n = n < sizeof edited.data - edited.bytes ? n : sizeof edited.data - edited.bytes;
		memmove(edited.data + at + n, edited.data + at, edited.bytes - at);
		edited.bytes += n;
		break;
	default: { /* the rest from another */
		const input *other = &files[random_next(random) % file_count];
		size_t from = other->bytes ? random_next(random) % other->bytes : 0;
		n = other->bytes - from;
		n = n < sizeof edited.data - at ? n : sizeof edited.data - at;
		memcpy(edited.data + at, other->data + from, n);
		edited.bytes = at + n;
	}
	}
}

static void run_seed(uint64_t seed)
{
	uint64_t random = seed * 0x9e3779b97f4a7c15u;
	edited = files[random_next(&random) % file_count];
	for (uint64_t edits = 1 + random_next(&random) % EDITS_MAX; edits; edits--)
		edit(&random);
	run(&edited);
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : SEEDS, first = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
	atexit(say_what_failed);
	signal(SIGSEGV, on_signal);
	signal(SIGBUS, on_signal);
	signal(SIGABRT, on_signal);
	run_files(argv[1]);
	for (uint64_t seed = first; seed < first + seeds; seed++) {
		snprintf(running, sizeof running, "failed: %.1000s %.1000s 1 %lu\n", argv[0], argv[1], (unsigned long)seed);
		run_seed(seed);
	}
	*running = 0;
	printf("    %u inputs of the corpus, %lu made from them\n", file_count, (unsigned long)seeds);
	return 0;
}
