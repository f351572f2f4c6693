/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Keeps the number of nginx's requests in progress in the file or the map of a load source, at each
 * change (docs/operate/load-sources.md, "Apache and nginx").
 *
 *	segue_load /sys/fs/bpf/segue/@loads/web [capacity];
 *
 * A request is in progress from the moment in which its header has been read until nginx has freed
 * it, after the response was sent. Each stream of HTTP/2 is a request.
 *
 * The master process opens the map as root. Each worker process takes a slot, which the kernel frees
 * in whatever way the worker ends.
 */
#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_http.h>

#include "segue_load.h"

typedef struct {
	ngx_str_t path;	     /* data is NULL: not set */
	ngx_uint_t capacity; /* 0: the number of processors */
	struct segue_load load;
	unsigned is_open : 1; /* load is valid */
} ngx_http_segue_load_conf_t;

ngx_module_t ngx_http_segue_load_module;

/* The load of this worker; NULL: it has no slot. */
static struct segue_load *ngx_http_segue_load;

/* Ends a request that counts. */
static void ngx_http_segue_load_end(void *unused)
{
	if (ngx_http_segue_load != NULL)
		segue_load_end(ngx_http_segue_load);
}

/* Begins a request. Its end is a cleanup and not a handler of the log phase, which would have to find
 * out whether the request counts: redirects inside of nginx clear the contexts of modules. */
static ngx_int_t ngx_http_segue_load_begin(ngx_http_request_t *r)
{
	ngx_http_cleanup_t *cleanup;

	if (ngx_http_segue_load == NULL || r != r->main)
		return NGX_DECLINED;
	cleanup = ngx_http_cleanup_add(r, 0);
	if (cleanup == NULL)
		return NGX_ERROR;
	cleanup->handler = ngx_http_segue_load_end;
	segue_load_begin(ngx_http_segue_load);
	return NGX_DECLINED;
}

static ngx_int_t ngx_http_segue_load_add_handler(ngx_conf_t *cf)
{
	ngx_http_core_main_conf_t *core =
		ngx_http_conf_get_module_main_conf(cf, ngx_http_core_module);
	ngx_http_handler_pt *handler =
		ngx_array_push(&core->phases[NGX_HTTP_POST_READ_PHASE].handlers);

	if (handler == NULL)
		return NGX_ERROR;
	*handler = ngx_http_segue_load_begin;
	return NGX_OK;
}

static void *ngx_http_segue_load_create_conf(ngx_conf_t *cf)
{
	return ngx_pcalloc(cf->pool, sizeof(ngx_http_segue_load_conf_t));
}

static char *ngx_http_segue_load_set(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
	ngx_http_segue_load_conf_t *own = conf;
	ngx_str_t *values = cf->args->elts;
	ngx_int_t capacity = 0;

	(void)cmd;
	if (own->path.data != NULL)
		return "is duplicate";
	if (values[1].data[0] != '/')
		return "needs an absolute path";
	if (cf->args->nelts == 3) {
		capacity = ngx_atoi(values[2].data, values[2].len);
		if (capacity < 1 || capacity > NGX_MAX_INT32_VALUE)
			return "needs a capacity of at least 1";
	}
	own->path = values[1]; /* ends with a zero byte */
	own->capacity = (ngx_uint_t)capacity;
	return NGX_CONF_OK;
}

static void ngx_http_segue_load_close(void *conf)
{
	ngx_http_segue_load_conf_t *own = conf;

	segue_load_close(&own->load);
}

static ngx_http_segue_load_conf_t *ngx_http_segue_load_conf_of(ngx_cycle_t *cycle)
{
	if (ngx_get_conf(cycle->conf_ctx, ngx_http_module) == NULL)
		return NULL; /* the configuration has no block http */
	return ngx_http_cycle_get_module_main_conf(cycle, ngx_http_segue_load_module);
}

/* Opens the file or the map in the master, as root. If that fails, nginx works, and reports no
 * load. */
static ngx_int_t ngx_http_segue_load_init_module(ngx_cycle_t *cycle)
{
	ngx_http_segue_load_conf_t *own = ngx_http_segue_load_conf_of(cycle);
	ngx_pool_cleanup_t *cleanup;
	int err;

	if (own == NULL || own->path.data == NULL || ngx_test_config)
		return NGX_OK;
	cleanup = ngx_pool_cleanup_add(cycle->pool, 0);
	if (cleanup == NULL)
		return NGX_ERROR;
	err = segue_load_prepare(&own->load, (const char *)own->path.data);
	if (err != 0) {
		ngx_log_error(NGX_LOG_ERR, cycle->log, -err,
			      "segue_load %V: cannot report the load", &own->path);
		return NGX_OK;
	}
	own->is_open = 1;
	cleanup->handler = ngx_http_segue_load_close;
	cleanup->data = own;
	return NGX_OK;
}

static ngx_int_t ngx_http_segue_load_init_process(ngx_cycle_t *cycle)
{
	ngx_http_segue_load_conf_t *own = ngx_http_segue_load_conf_of(cycle);
	int err;

	if (own == NULL || !own->is_open ||
	    (ngx_process != NGX_PROCESS_WORKER && ngx_process != NGX_PROCESS_SINGLE))
		return NGX_OK;
	err = segue_load_join(&own->load, own->capacity != 0 ? (uint32_t)own->capacity
							     : (uint32_t)ngx_max(ngx_ncpu, 1));
	if (err != 0) {
		ngx_log_error(NGX_LOG_ERR, cycle->log, -err,
			      "segue_load %V: cannot report the load", &own->path);
		return NGX_OK;
	}
	ngx_http_segue_load = &own->load;
	return NGX_OK;
}

/* Requests that end later, while the worker frees its memory, no longer count. */
static void ngx_http_segue_load_exit_process(ngx_cycle_t *cycle)
{
	(void)cycle;
	ngx_http_segue_load = NULL;
}

static ngx_command_t ngx_http_segue_load_commands[] = {
	{ ngx_string("segue_load"), NGX_HTTP_MAIN_CONF | NGX_CONF_TAKE12, ngx_http_segue_load_set,
	  NGX_HTTP_MAIN_CONF_OFFSET, 0, NULL },
	ngx_null_command,
};

static ngx_http_module_t ngx_http_segue_load_context = {
	NULL,				 /* before the configuration */
	ngx_http_segue_load_add_handler, /* after it */
	ngx_http_segue_load_create_conf,
	NULL,
	NULL,
	NULL,
	NULL,
	NULL,
};

ngx_module_t ngx_http_segue_load_module = {
	NGX_MODULE_V1,
	&ngx_http_segue_load_context,
	ngx_http_segue_load_commands,
	NGX_HTTP_MODULE,
	NULL,
	ngx_http_segue_load_init_module,
	ngx_http_segue_load_init_process,
	NULL,
	NULL,
	ngx_http_segue_load_exit_process,
	NULL,
	NGX_MODULE_V1_PADDING,
};
