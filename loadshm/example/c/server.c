/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A server with a pool of threads that takes HTTP uploads and reports the number of busy threads.
 *
 *	cc -pthread -I loadshm -o server loadshm/example/c/server.c
 *	./server /run/shop/load 8
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/socket.h>

#include "segue_load.h"

static struct segue_load load;

/* Reads a request with its body, and answers with the length of the body. */
static void serve(FILE *in, FILE *out)
{
	char line[4096];
	long length = 0, n;

	while (fgets(line, sizeof(line), in) && line[0] != '\r')
		if (strncasecmp(line, "Content-Length:", 15) == 0)
			length = atol(line + 15);
	for (n = 0; n < length && getc(in) != EOF; n++)
		;
	fprintf(out, "HTTP/1.0 200 OK\r\n\r\n%ld bytes\n", n);
}

static void *worker(void *listener)
{
	for (;;) {
		int fd = accept(*(int *)listener, NULL, NULL);
		FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");

		segue_load_begin(&load);
		if (in && out)
			serve(in, out);
		if (out)
			fclose(out);
		segue_load_end(&load);
		if (in)
			fclose(in);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof(address);
	int listener, err, i, workers;
	pthread_t thread;

	if (argc != 3) {
		fprintf(stderr, "usage: server FILE WORKERS\n");
		return 2;
	}
	workers = atoi(argv[2]);
	err = segue_load_open(&load, argv[1], workers);
	if (err != 0) {
		fprintf(stderr, "%s: %s\n", argv[1], strerror(-err));
		return 1;
	}
	signal(SIGPIPE, SIG_IGN); /* clients may close their connection */
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, 128) != 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &size) != 0) {
		perror("listen");
		return 1;
	}
	for (i = 0; i < workers; i++)
		if (pthread_create(&thread, NULL, worker, &listener) != 0) {
			perror("pthread_create");
			return 1;
		}
	printf("127.0.0.1:%d\n", ntohs(address.sin_port));
	fflush(stdout);
	pthread_join(thread, NULL);
	return 0;
}
