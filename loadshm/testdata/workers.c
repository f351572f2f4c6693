/*
 * This program's capacity is 7. Two workers, which cannot open the file themselves, are busy with a
 * request each. The program prints a line for each step: when both are busy, when the first one has
 * been killed, and when the second one has ended. It waits for a byte of its standard input before
 * each further step.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "segue_load.h"

/* Tells what has happened, and waits for a byte. */
static void step(const char *what)
{
	char byte;

	printf("%s\n", what);
	fflush(stdout);
	if (read(STDIN_FILENO, &byte, 1) < 0)
		exit(1);
}

/* Starts a worker, and returns when it is busy. It ends without closing its slot when `ends` has no
 * writer any more. */
static pid_t start_worker(struct segue_load *load, int ends[2])
{
	int ready[2];
	char byte;
	pid_t pid;

	if (pipe(ready) != 0 || (pid = fork()) < 0)
		exit(1);
	if (pid == 0) {
		close(ends[1]);
		if (setuid(65534) != 0 || segue_load_join(load, 7) != 0)
			_exit(1);
		segue_load_begin(load);
		if (write(ready[1], "r", 1) != 1 || read(ends[0], &byte, 1) != 0)
			_exit(1);
		_exit(0);
	}
	close(ready[1]);
	if (read(ready[0], &byte, 1) != 1)
		exit(1);
	close(ready[0]);
	return pid;
}

int main(int argc, char **argv)
{
	struct segue_load load;
	int ends[2], err;
	pid_t first;

	if (argc != 2 || pipe(ends) != 0)
		return 1;
	err = segue_load_prepare(&load, argv[1]);
	if (err != 0) {
		printf("%s: %s\n", argv[1], strerror(-err));
		return 1;
	}
	first = start_worker(&load, ends);
	start_worker(&load, ends);
	step("busy");
	kill(first, SIGKILL);
	waitpid(first, NULL, 0);
	step("killed");
	close(ends[1]);
	wait(NULL);
	step("ended");
	segue_load_close(&load);
	return 0;
}
