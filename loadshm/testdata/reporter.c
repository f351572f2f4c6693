/*
 * This program is busy with 1 of 4 requests until its standard input ends. It has two children: a
 * forked process that has closed its parent's slot, and an executed program.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "segue_load.h"

/* Starts a forked child that closes its parent's slot, and one that executes another program. It
 * returns when the first child has closed the slot, and the second one has executed the program. */
static void start_children(struct segue_load *load)
{
	char byte, ready;
	int pipe_fds[2];

	if (pipe(pipe_fds) != 0)
		exit(1);
	if (fork() == 0) {
		segue_load_close(load);
		if (write(pipe_fds[1], "r", 1) != 1)
			_exit(1);
		while (read(STDIN_FILENO, &byte, 1) > 0)
			;
		_exit(0);
	}
	if (read(pipe_fds[0], &ready, 1) != 1)
		exit(1);
	close(pipe_fds[0]);
	close(pipe_fds[1]);
	if (vfork() == 0) { /* returns when the child has executed the program */
		execlp("cat", "cat", (char *)NULL);
		_exit(1);
	}
}

int main(int argc, char **argv)
{
	struct segue_load load;
	char byte;

	if (argc != 2 || segue_load_open(&load, argv[1], 4) != 0)
		return 1;
	segue_load_begin(&load);
	start_children(&load);
	printf("busy\n");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	return 0;
}
