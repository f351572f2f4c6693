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
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
)

// Client calls the API of an instance on this host.
type Client struct {
	// AllowRemovals permits changes to take more servers out of service than the limit allows.
	AllowRemovals bool
	// IfVersion is the version that must be in force for a change. Empty: any version.
	IfVersion string

	instance string
	http     http.Client
}

// NewClient returns a client of an instance. It opens no connection.
func NewClient(instance string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", rundir.SocketFile(instance))
	}
	return &Client{instance: instance, http: http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Instance returns the name of the instance.
func (c *Client) Instance() string { return c.instance }

// Identify returns the name, the role and the build of the instance that answers.
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

// Service returns a service of a balancer, or nil if the balancer has no such service.
func (c *Client) Service(ctx context.Context, name string) (*Service, error) {
	var services []Service
	query := url.Values{"name": {name}}
	err := c.call(ctx, http.MethodGet, "/v1/services?"+query.Encode(), nil, &services)
	for i := range services {
		if services[i].Name == name {
			return &services[i], err
		}
	}
	return nil, err
}

// Overrides returns all overrides, and the version in force.
func (c *Client) Overrides(ctx context.Context) (overrides *Overrides, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/overrides", nil, &overrides)
	return overrides, err
}

// Change makes all of the edits, or none of them. A dry run changes nothing.
func (c *Client) Change(ctx context.Context, dryRun bool, edits ...Edit) (changed *Changed, err error) {
	path := "/v1/changes" + c.changeQuery(dryRun)
	err = c.call(ctx, http.MethodPost, path, Change{edits}, &changed, c.versionHeader()...)
	return changed, err
}

// Apply changes the services to those of a configuration file with this content. A dry run changes
// nothing.
func (c *Client) Apply(ctx context.Context, file []byte, dryRun bool) (changed *Changed, err error) {
	path := "/v1/services" + c.changeQuery(dryRun)
	err = c.send(ctx, http.MethodPut, path, "application/yaml", bytes.NewReader(file), &changed, c.versionHeader()...)
	return changed, err
}

// changeQuery returns the query of a change. It has allow-removals only if needed, because an agent
// refuses this parameter for edits.
func (c *Client) changeQuery(dryRun bool) string {
	if c.AllowRemovals {
		return fmt.Sprintf("?dry-run=%t&allow-removals=true", dryRun)
	}
	return fmt.Sprintf("?dry-run=%t", dryRun)
}

// versionHeader returns the name and the value of the header that tells which version must be in
// force for a change. It returns nil if any version may be.
func (c *Client) versionHeader() []string {
	if c.IfVersion == "" {
		return nil
	}
	return []string{"If-Match", c.IfVersion}
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
	err = c.call(ctx, http.MethodPost, confirmPath, nil, &s, "If-Match", version)
	return s, err
}

// EventsFrom says which kept events of the process a stream sends before new events. The zero value
// means none.
type EventsFrom struct {
	Last  int       // at most this many of the last events; 0: any number
	Since time.Time // only events of this time or later; zero: of any time
}

// query returns the query of the request for events.
func (f EventsFrom) query() string {
	query := url.Values{}
	if f.Last > 0 {
		query.Set("last", strconv.Itoa(f.Last))
	}
	if !f.Since.IsZero() {
		query.Set("since", f.Since.Format(time.RFC3339Nano))
	}
	if len(query) == 0 {
		return ""
	}
	return "?" + query.Encode()
}

// reconnectInterval is the time between two attempts to reach a process that has ended.
const reconnectInterval = 500 * time.Millisecond

// Events calls handle for each event, until handle fails, or until the context ends. A process must
// answer the first request. If the connection is interrupted later, Events connects again and
// continues with the next event. If the process has ended, Events calls onWait once, and continues
// when a new process answers. The error is nil only if the context has ended.
func (c *Client) Events(
	ctx context.Context, from EventsFrom, handle func(events.Event) error, onWait func(),
) error {
	isWaiting := false // onWait was called since the last event
	pause := func() {
		if !isWaiting {
			onWait()
		}
		isWaiting = true
		select {
		case <-ctx.Done():
		case <-time.After(reconnectInterval):
		}
	}
	for last := ""; ; { // the number of the last event; empty: the process has not answered yet
		response, err := c.openEvents(ctx, from, last)
		switch {
		case ctx.Err() != nil:
			return nil
		case last != "" && isUnready(response, err):
			pause()
			continue
		case err != nil:
			return c.explain(err)
		case response.StatusCode != http.StatusOK:
			return fmt.Errorf("instance %q answers %s", c.instance, response.Status)
		}
		next, interruption, err := readEvents(response.Body, handle)
		_ = response.Body.Close()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case next != "":
			last, isWaiting = next, false
		case last == "":
			return fmt.Errorf("instance %q: the stream of events has ended: %w", c.instance, interruption)
		default: // a later process has ended before it sent anything
			pause()
		}
	}
}

// isUnready tells whether a request for events has failed because no process runs, or because the
// process still waits for its store.
func isUnready(response *http.Response, err error) bool {
	if err != nil {
		return hasEnded(err) || isEnding(err)
	}
	return response.StatusCode == http.StatusServiceUnavailable
}

// openEvents asks for the events after the one with the number last. If last is empty, it asks for
// the events that from names.
func (c *Client) openEvents(ctx context.Context, from EventsFrom, last string) (*http.Response, error) {
	query := from.query()
	if last != "" {
		query = ""
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://segue"+eventsPath+query, http.NoBody)
	if err != nil {
		return nil, err
	}
	if last != "" {
		r.Header.Set("Last-Event-ID", last)
	}
	response, err := c.http.Do(r)
	if err == nil && response.StatusCode != http.StatusOK {
		_ = response.Body.Close() // the status says enough
	}
	return response, err
}

// readEvents reads server-sent events until the connection is interrupted, and calls handle for
// each. It returns the number of the last event, why the connection ended, and the error of handle.
// It drops an event that is cut off: the next connection brings all of it. An event without data
// only tells the number after which the events continue.
func readEvents(body io.Reader, handle func(events.Event) error) (last string, interruption, err error) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, longestEvent)
	var id string
	var data []byte
	for lines.Scan() {
		line := lines.Bytes()
		switch value, ok := bytes.CutPrefix(line, []byte("id: ")); {
		case ok:
			id = string(value)
			continue
		case bytes.HasPrefix(line, []byte("data: ")):
			data = bytes.Clone(line[len("data: "):])
			continue
		case len(line) > 0: // a comment
			continue
		case id == "" && data == nil: // the empty line after a comment
			continue
		}
		// An empty line ends the event.
		if data != nil {
			var e events.Event
			if err := json.Unmarshal(data, &e); err != nil {
				return last, nil, fmt.Errorf("the event %s: %w", id, err)
			}
			if err := handle(e); err != nil {
				return last, nil, err
			}
		}
		last, id, data = id, "", nil
	}
	if interruption = lines.Err(); interruption == nil {
		interruption = io.EOF
	}
	return last, interruption, nil
}

// longestEvent is more than the size of any event, in bytes.
const longestEvent = 1 << 20

// call makes a request with a JSON body and reads the answer. headers are alternately the name and
// the value of a header.
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

// send makes a request with a body of any type and reads the answer. headers are as for call.
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
		return c.refusedBy(response)
	}
	if err := json.NewDecoder(response.Body).Decode(answer); err != nil {
		return fmt.Errorf("the answer of instance %q: %w", c.instance, err)
	}
	return nil
}

// refusedBy returns the error of a request that was refused by a response.
func (c *Client) refusedBy(response *http.Response) error {
	var problem huma.ErrorModel
	if json.NewDecoder(response.Body).Decode(&problem) == nil {
		return problemError(&problem)
	}
	switch response.StatusCode {
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		// An earlier build has no such operation, and answers with plain text.
		return fmt.Errorf("instance %q does not know the request %s %s: its process runs another build; "+
			"restart it", c.instance, response.Request.Method, response.Request.URL.Path)
	}
	return fmt.Errorf("instance %q answers %s", c.instance, response.Status)
}

// problemError returns an error with the text of a problem that the API has answered.
func problemError(problem *huma.ErrorModel) error {
	texts := []string{problem.Detail}
	for _, e := range problem.Errors {
		texts = append(texts, fmt.Sprintf("%s: %s", e.Location, e.Message))
	}
	return errors.New(strings.Join(texts, "\n"))
}

// hasEnded tells whether a request has failed with err because no process serves the socket.
func hasEnded(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// isEnding tells whether a request has failed with err because the process closed the connection
// before it answered.
func isEnding(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF)
}

// explain returns an error that says why an instance cannot be reached.
func (c *Client) explain(err error) error {
	switch {
	case hasEnded(err):
		return fmt.Errorf("no process runs the instance %q on this host", c.instance)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: not permitted: be root, or a member of the group in api.group",
			rundir.SocketFile(c.instance))
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the process of instance %q does not answer", c.instance)
	}
	return fmt.Errorf("instance %q: %w", c.instance, err)
}
