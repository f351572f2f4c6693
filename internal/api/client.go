// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/runstate"
)

// Client calls the API of an instance on this host.
type Client struct {
	// AllowRemovals lets changes remove more servers than the limit of the balancer's store.
	AllowRemovals bool

	instance string
	http     http.Client
}

// NewClient returns a client of an instance. It opens no connection.
func NewClient(instance string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", runstate.SocketFile(instance))
	}
	return &Client{instance: instance, http: http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Instance returns the name of the instance.
func (c *Client) Instance() string { return c.instance }

// Identify tells which process has the socket.
func (c *Client) Identify(ctx context.Context) (self *Instance, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/instance", nil, &self)
	return self, err
}

// AgentServices returns the services of an agent.
func (c *Client) AgentServices(ctx context.Context) (services []AgentService, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/services", nil, &services)
	return services, err
}

// Services returns the services of a balancer.
func (c *Client) Services(ctx context.Context) (services []Service, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/services", nil, &services)
	return services, err
}

// Overrides returns all overrides, and the version in force.
func (c *Client) Overrides(ctx context.Context) (overrides *Overrides, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/overrides", nil, &overrides)
	return overrides, err
}

// Change makes edits in one transaction. A dry run changes nothing.
func (c *Client) Change(ctx context.Context, dryRun bool, edits ...Edit) (changed *Changed, err error) {
	path := "/v1/changes" + c.terms(dryRun)
	err = c.call(ctx, http.MethodPost, path, Change{edits}, &changed)
	return changed, err
}

// Apply makes the services those of the content of a configuration file. A dry run changes nothing.
func (c *Client) Apply(ctx context.Context, file []byte, dryRun bool) (changed *Changed, err error) {
	path := "/v1/services" + c.terms(dryRun)
	err = c.send(ctx, http.MethodPut, path, "application/yaml", bytes.NewReader(file), &changed)
	return changed, err
}

// terms returns the query of a change. Only balancers know the second term.
func (c *Client) terms(dryRun bool) string {
	if c.AllowRemovals {
		return fmt.Sprintf("?dry-run=%t&allow-removals=true", dryRun)
	}
	return fmt.Sprintf("?dry-run=%t", dryRun)
}

// Reload makes the process read its files again.
func (c *Client) Reload(ctx context.Context) (reloaded *Reloaded, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/reload", nil, &reloaded)
	return reloaded, err
}

// Store returns the condition of the balancer's connection to the store of its fleet.
func (c *Client) Store(ctx context.Context) (s *Store, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/store", nil, &s)
	return s, err
}

// ConfirmStore makes the balancer follow a version of the store although that removes more servers
// than the limit allows.
func (c *Client) ConfirmStore(ctx context.Context, version string) (s *Store, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/store/confirm", nil, &s, "If-Match", version)
	return s, err
}

// Events calls a function for each event from now on, until the function or the connection fails, or
// the context ends. The error is nil only if the context has ended.
func (c *Client) Events(ctx context.Context, each func(events.Event) error) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://segue/v1/events", http.NoBody)
	if err != nil {
		return err
	}
	response, err := c.http.Do(r)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return c.explain(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("instance %q answers %s", c.instance, response.Status)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, longestEvent)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		var e events.Event
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("an event of instance %q: %w", c.instance, err)
		}
		if err := each(e); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil
	case lines.Err() != nil && !errors.Is(lines.Err(), io.ErrUnexpectedEOF):
		return fmt.Errorf("instance %q: %w", c.instance, lines.Err())
	}
	return fmt.Errorf("the process of the instance %q has ended", c.instance)
}

// longestEvent is more than the size of the longest event, in bytes.
const longestEvent = 1 << 20

// call makes a request with JSON and reads the answer. Each name of a header precedes its value.
func (c *Client) call(
	ctx context.Context, method, path string, request, answer any, headers ...string,
) error {
	var content bytes.Buffer
	if request != nil {
		if err := json.NewEncoder(&content).Encode(request); err != nil {
			return err
		}
	}
	return c.send(ctx, method, path, "application/json", &content, answer, headers...)
}

// send makes a request and reads the answer.
func (c *Client) send(
	ctx context.Context, method, path, contentType string, content io.Reader, answer any,
	headers ...string,
) error {
	r, err := http.NewRequestWithContext(ctx, method, "http://segue"+path, content)
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", contentType)
	for header := range slices.Chunk(headers, 2) {
		r.Header.Set(header[0], header[1])
	}
	response, err := c.http.Do(r)
	if err != nil {
		return c.explain(err)
	}
	defer response.Body.Close()
	if response.StatusCode >= http.StatusBadRequest {
		var problem huma.ErrorModel
		err := json.NewDecoder(response.Body).Decode(&problem)
		switch {
		case err != nil && response.StatusCode == http.StatusNotFound: // of a build without the path
			return fmt.Errorf("instance %q does not know the request %s %s: its process runs another build; restart it",
				c.instance, method, r.URL.Path)
		case err != nil:
			return fmt.Errorf("instance %q answers %s", c.instance, response.Status)
		}
		return explained(&problem)
	}
	if err := json.NewDecoder(response.Body).Decode(answer); err != nil {
		return fmt.Errorf("the answer of instance %q: %w", c.instance, err)
	}
	return nil
}

// explained returns an answer of the API as an error.
func explained(problem *huma.ErrorModel) error {
	texts := []string{problem.Detail}
	for _, e := range problem.Errors {
		texts = append(texts, fmt.Sprintf("%s: %s", e.Location, e.Message))
	}
	return errors.New(strings.Join(texts, "\n"))
}

// explain says why an instance cannot be reached.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no process runs the instance %q on this host", c.instance)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: not permitted: be root, or a member of the group in api.group",
			runstate.SocketFile(c.instance))
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the process of instance %q does not answer", c.instance)
	}
	return fmt.Errorf("instance %q: %w", c.instance, err)
}
