/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Keeps the number of Apache's busy workers in the file or the map of a load source, at each change
 * (docs/operate/load-sources.md, "Apache and nginx").
 *
 *	SegueLoad /sys/fs/bpf/segue/@loads/web [CAPACITY]
 *
 * A worker is busy while it has a connection: from the moment in which it gets the connection until
 * the connection is closed, or until the MPM event takes it to wait for the client. This is the
 * number that the scoreboard shows. Of a connection of HTTP/2, each stream that has a worker counts,
 * in place of the connection.
 *
 * The parent process opens the map as root. Each child process takes a slot, which the kernel frees
 * in whatever way the child ends.
 */
#include "httpd.h"
#include "http_config.h"
#include "http_connection.h"
#include "http_core.h"
#include "http_log.h"
#include "http_protocol.h"
#include "http_request.h"
#include "ap_mpm.h"
#include "apr_atomic.h"
#include "apr_lib.h"
#include "apr_strings.h"
#include "mpm_common.h"
#include "util_filter.h"

#include "segue_load.h"

extern module AP_MODULE_DECLARE_DATA segue_load_module;
APLOG_USE_MODULE(segue_load);

static const char filter_name[] = "SEGUE_LOAD";

/* The configuration. */
static const char *path;
static apr_uint32_t capacity; /* 0: MaxRequestWorkers */

/* The memory of the load. The file is NULL while none is open. */
static struct segue_load load;

/* Whether a connection counts. Threads of HTTP/2 change it beside the connection's own thread. */
enum connection_state { WAITING, BUSY, HAS_STREAMS };

struct connection {
	volatile apr_uint32_t state; /* enum connection_state */
};

static struct connection *find(const conn_rec *c)
{
	return ap_get_module_config(c->conn_config, &segue_load_module);
}

static void enter(struct connection *connection)
{
	if (apr_atomic_cas32(&connection->state, BUSY, WAITING) == WAITING)
		segue_load_begin(&load);
}

static void leave(struct connection *connection)
{
	if (apr_atomic_cas32(&connection->state, WAITING, BUSY) == BUSY)
		segue_load_end(&load);
}

/* The streams of a connection count from now on, and no longer the connection. */
static void leave_to_streams(struct connection *connection)
{
	if (apr_atomic_xchg32(&connection->state, HAS_STREAMS) == BUSY)
		segue_load_end(&load);
}

static apr_status_t end_connection(void *connection)
{
	leave(connection);
	return APR_SUCCESS;
}

/* A worker has got a connection, or a stream of HTTP/2, which has a master. */
static int process_connection(conn_rec *c)
{
	struct connection *connection = find(c), *master;

	if (load.word == NULL)
		return DECLINED;
	if (connection == NULL) {
		connection = apr_pcalloc(c->pool, sizeof(*connection));
		ap_set_module_config(c->conn_config, &segue_load_module, connection);
		apr_pool_cleanup_register(c->pool, connection, end_connection,
					  apr_pool_cleanup_null);
		if (c->master != NULL)
			ap_add_output_filter(filter_name, NULL, NULL, c);
	}
	enter(connection);
	master = c->master != NULL ? find(c->master) : NULL;
	if (master != NULL)
		leave_to_streams(master);
	return DECLINED;
}

/* The MPM waits for the client, without a worker. */
static void suspend_connection(conn_rec *c, request_rec *r)
{
	struct connection *connection = find(c);

	if (connection != NULL)
		leave(connection);
}

static void resume_connection(conn_rec *c, request_rec *r)
{
	struct connection *connection = find(c);

	if (connection != NULL)
		enter(connection);
}

/* The worker of a stream has sent its response. The pool of the stream may live until the client
 * does something, so its end would be too late. */
static apr_status_t end_stream(ap_filter_t *filter, apr_bucket_brigade *brigade)
{
	struct connection *connection = find(filter->c);
	int is_end = 0;
	apr_status_t status;
	apr_bucket *b;

	for (b = APR_BRIGADE_FIRST(brigade); b != APR_BRIGADE_SENTINEL(brigade) && !is_end;
	     b = APR_BUCKET_NEXT(b))
		is_end = AP_BUCKET_IS_EOR(b);
	status = ap_pass_brigade(filter->next, brigade);
	if (is_end)
		leave(connection);
	return status;
}

/* The parent closes the load before it reads its configuration again. A child that ends only clears
 * its slot: its threads may still use the memory. */
static apr_status_t close_load(void *unused)
{
	if (load.word != NULL) {
		segue_load_set(&load, 0, 0);
		return APR_SUCCESS;
	}
	segue_load_close(&load);
	memset(&load, 0, sizeof(load));
	return APR_SUCCESS;
}

/* Opens the file or the map, as root. If that fails, Apache works, and reports no load. */
static int post_config(apr_pool_t *pconf, apr_pool_t *plog, apr_pool_t *ptemp, server_rec *s)
{
	int err;

	if (path == NULL || ap_state_query(AP_SQ_MAIN_STATE) == AP_SQ_MS_CREATE_PRE_CONFIG)
		return OK; /* the configuration is read twice */
	err = segue_load_prepare(&load, path);
	if (err != 0) {
		ap_log_error(APLOG_MARK, APLOG_ERR, -err, s, "SegueLoad %s: cannot report the load",
			     path);
		return OK;
	}
	apr_pool_cleanup_register(pconf, NULL, close_load, apr_pool_cleanup_null);
	return OK;
}

/* The number of connections that Apache serves at a time. */
static apr_uint32_t most_workers(void)
{
	int children = 0, threads = 0;

	if (capacity != 0)
		return capacity;
	ap_mpm_query(AP_MPMQ_MAX_DAEMONS, &children);
	ap_mpm_query(AP_MPMQ_MAX_THREADS, &threads);
	return (apr_uint32_t)(children > 0 ? children : 1) * (threads > 0 ? threads : 1);
}

static void child_init(apr_pool_t *pchild, server_rec *s)
{
	int err;

	if (load.file == NULL)
		return;
	err = segue_load_join(&load, most_workers());
	if (err != 0)
		ap_log_error(APLOG_MARK, APLOG_ERR, -err, s, "SegueLoad %s: cannot report the load",
			     path);
	apr_pool_cleanup_register(pchild, NULL, close_load, apr_pool_cleanup_null);
}

static const char *set_path(cmd_parms *cmd, void *unused, const char *name, const char *number)
{
	const char *wrong = ap_check_cmd_context(cmd, GLOBAL_ONLY);
	apr_int64_t n = 0;
	char *end;

	if (wrong != NULL)
		return wrong;
	if (name[0] != '/')
		return apr_pstrcat(cmd->pool, "SegueLoad ", name, ": must be absolute", NULL);
	if (number != NULL) {
		n = apr_strtoi64(number, &end, 10);
		if (*end != '\0' || n < 1 || n > APR_UINT32_MAX)
			return apr_psprintf(cmd->pool,
					    "SegueLoad %s %s: the capacity must be 1 to %u", name,
					    number, APR_UINT32_MAX);
	}
	path = name;
	capacity = (apr_uint32_t)n;
	return NULL;
}

static const command_rec commands[] = {
	AP_INIT_TAKE12(
		"SegueLoad", set_path, NULL, RSRC_CONF,
		"file or pinned map of the load, and the capacity (default MaxRequestWorkers)"),
	{ NULL },
};

/* Forgets the configuration before it is read again. */
static int pre_config(apr_pool_t *pconf, apr_pool_t *plog, apr_pool_t *ptemp)
{
	path = NULL;
	capacity = 0;
	return OK;
}

static void register_hooks(apr_pool_t *pool)
{
	ap_hook_pre_config(pre_config, NULL, NULL, APR_HOOK_MIDDLE);
	ap_hook_post_config(post_config, NULL, NULL, APR_HOOK_MIDDLE);
	ap_hook_child_init(child_init, NULL, NULL, APR_HOOK_MIDDLE);
	ap_hook_process_connection(process_connection, NULL, NULL, APR_HOOK_REALLY_FIRST);
	ap_hook_suspend_connection(suspend_connection, NULL, NULL, APR_HOOK_MIDDLE);
	ap_hook_resume_connection(resume_connection, NULL, NULL, APR_HOOK_MIDDLE);
	ap_register_output_filter(filter_name, end_stream, NULL, AP_FTYPE_CONNECTION);
}

module AP_MODULE_DECLARE_DATA segue_load_module = {
	STANDARD20_MODULE_STUFF, NULL, NULL, NULL, NULL, commands, register_hooks,
#if defined(AP_MODULE_FLAG_NONE)
	AP_MODULE_FLAG_NONE,
#endif
};
