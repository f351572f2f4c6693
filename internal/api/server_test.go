// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/testhost"
)

type follower struct{}

// unreported is for tests that do not look at the overrides that the controller reports.
func unreported([]desired.Override, []desired.InvalidOverride) {}

func (follower) Reload(context.Context, *desired.Balancer, desired.Secrets) error { return nil }

func (follower) Follow(
	context.Context, *desired.Balancer, desired.Secrets, serversets.Generations,
) error {
	return nil
}

// Losses counts only removed servers.
func (follower) Losses(_ context.Context, b *desired.Balancer) (losses []desired.Loss, err error) {
	for _, name := range []string{"s1", "s2"} {
		if b.Server("web", name) == nil {
			losses = append(losses, desired.Loss{
				Service: "web", Server: name, Cause: desired.LossRemoved, Flows: new(uint64(12)),
			})
		}
	}
	return losses, nil
}

const text = `
node: {instance: edge, interface: eth0, addresses: ["2001:db8::1"], state: %q}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, encapsulation: gre,
   servers: [{name: s1, address: "2001:db8:1::1", weight: 3}, {name: s2, address: "2001:db8:1::2"}]}
- {name: quic, vip: "2001:db8:80::1", port: 443, protocol: udp, encapsulation: gre,
   servers: [{name: s1, address: "2001:db8:1::1"}]}
`

// serve is serveEvents for tests that do not look at events.
func serve(t *testing.T, snapshot *inspect.Snapshot) *httptest.Server {
	server, _ := serveEvents(t, snapshot)
	return server
}

// serveEvents serves the API of a balancer whose tables are as in the snapshot.
func serveEvents(t *testing.T, snapshot *inspect.Snapshot) (*httptest.Server, *events.Stream) {
	t.Helper()
	return serveWith(t, snapshot, nil)
}

// loadBalancer returns the controller of a balancer that follows every state.
func loadBalancer(t *testing.T) *control.Balancer {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "lb.yaml")
	testhost.Must(t, os.WriteFile(file, fmt.Appendf(nil, text, dir), 0o644))
	c, _, err := control.LoadBalancer(file)
	testhost.Must(t, err)
	c.Attach(follower{}, unreported)
	return c
}

// serveWith is serveEvents with a speaker.
func serveWith(
	t *testing.T, snapshot *inspect.Snapshot, speaker Speaker,
) (*httptest.Server, *events.Stream) {
	t.Helper()
	c := loadBalancer(t)
	stream := events.NewStream()
	server := httptest.NewServer(Balancer{
		Events:  stream,
		Control: c, Reload: c.Reload,
		Source:  func(func(string) bool) (*inspect.Snapshot, error) { return snapshot, nil },
		Speaker: speaker,
	}.Handler())
	t.Cleanup(server.Close)
	return server, stream
}

// send sends a request, and returns the status and the body of the answer.
func send(t *testing.T, method, url, body string, headers ...string) (status int, answer string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	testhost.Must(t, err)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(r)
	testhost.Must(t, err)
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	testhost.Must(t, err)
	return response.StatusCode, string(content)
}

// Each cause of an error has its status. If a change may have been made, the status is 504.
func TestRefusal(t *testing.T) {
	t.Parallel()
	for want, causes := range map[int][]error{
		http.StatusNotFound: {control.ErrNotFound},
		http.StatusConflict: {
			control.ErrExists, control.ErrStored, control.ErrRemovals, control.ErrHeld,
		},
		http.StatusPreconditionFailed:  {control.ErrVersion},
		http.StatusUnprocessableEntity: {fieldpath.Errors{{Path: "web.port", Problem: "required"}}},
		http.StatusGatewayTimeout:      {store.ErrUnknown},
		http.StatusServiceUnavailable:  {store.ErrEmpty},
	} {
		for _, cause := range causes {
			var problem huma.StatusError
			err := fmt.Errorf("the cause: %w", cause)
			if !errors.As(refusal(err), &problem) || problem.GetStatus() != want || problem.Error() != err.Error() {
				t.Errorf("%v: answer %v, want status %d", err, problem, want)
			}
		}
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	url := serve(t, &inspect.Snapshot{}).URL + "/v1/"
	const dry = "changes?dry-run=true"
	edits := func(list string) string { return `{"edits":[` + list + `]}` }
	s1 := func(action string) string { return edits(`{"service":"web","server":"s1",` + action + `}`) }
	const none, s3 = `"overrides":[]`, `{"service":"web","server":"s3","add":{"address":"2001:db8:1::3"}}`
	const other = "services: [{name: other, vip: \"2001:db8:80::2\", port: 80, protocol: tcp, encapsulation: gre, " +
		"servers: [{name: s9, address: \"2001:db8:1::9\"}]}]\n"
	bomb := "services: &s0 [{}, {}]\n" // each line stands for ten times as much as the line before
	for i := range 30 {
		bomb += fmt.Sprintf("a%d: &s%d [%s]\n", i, i+1, strings.Repeat(fmt.Sprintf("*s%d,", i), 10))
	}
	file := strings.Replace(text, "weight: 3", "weight: 4", 1)
	file = file[strings.Index(file, "services:"):]
	for i, step := range []struct {
		method, path, body string
		headers            []string
		status             int
		answer             string // part of it
	}{
		{"GET", "overrides", "", nil, 200, none},
		{"POST", "changes", s1(`"set":{"drained":true}`), []string{"If-Match", "old"}, 412, "has another version"},
		{"POST", "changes", s1(`"remove":true`), []string{"If-Match", ""}, 422, "header.If-Match"},
		{"PUT", "services", file, []string{"Content-Type", "application/yaml", "If-Match", " "}, 422, "header.If-Match"},
		{"POST", "changes", edits(`{"service":"web","server":"","remove":true}`), nil, 422, "edits[0].server"},
		{"POST", "changes", edits(`{"service":"web","server":null,"remove":true}`), nil, 422, "server of an edit must not be null"},
		{"POST", dry, s1(`"set":{"drained":true}`), nil, 200, `"items":["web/s1 (drained false to true)"]`},
		{"GET", "overrides", "", nil, 200, none},
		{"POST", "changes", s1(`"set":{"drained":true,"weight":7}`), nil, 200, `"web/s1 (weight 3 to 7, drained false to true)"`},
		{"GET", "overrides", "", nil, 200, `"overrides":[{"service":"web","server":"s1","set":{"drained":true,"weight":7}}]`},
		{"POST", "changes", s1(`"set":{"weight":3}`), nil, 200, `"web/s1 (weight 7 to 3)"`}, // that of the file
		{"GET", "overrides", "", nil, 200, `"overrides":[{"service":"web","server":"s1","set":{"drained":true}}]`},
		{"PUT", "services", file, []string{"Content-Type", "application/yaml"}, 200, `"web/s1 (weight 3 to 4)"`},
		{"GET", "overrides", "", nil, 200, `"overrides":[{"service":"web","server":"s1","set":{"drained":true,"weight":4}}]`},
		{"POST", "changes", s1(`"reset":true`), nil, 200, `"web/s1 (weight 4 to 3, drained true to false)"`},
		{"POST", "changes", s1(`"reset":true`), nil, 200, `"changes":[]`},
		{"POST", "changes", edits(s3 + `,` + s3), nil, 409, "web/s3: exists already"},
		{"POST", "changes", edits(s3), nil, 200, `"kind":"servers_added","items":["web/s3"]`},
		{"POST", "changes", edits(`{"service":"web","server":"s3","remove":true}`), nil, 200, `"kind":"servers_removed"`},
		{"POST", "changes", edits(`{"service":"web","server":"s9","set":{"drained":true}}`), nil, 404, "web/s9"},
		{"POST", "changes", s1(`"set":{"weight":1001}`), nil, 422, `web/s1.weight \"1001\"`},
		{"POST", "changes", s1(`"set":{"drained":"yes"}`), nil, 422, `web/s1.drained \"yes\": must be true or false`},
		{"POST", "changes", s1(`"set":{"drain":true}`), nil, 422, "web/s1.drain: unknown field"},
		{"POST", "changes", s1(`"drain":true`), nil, 422, "drain"},
		{"POST", "changes", s1(`"set":{"weight":1},"remove":true`), nil, 422, "match exactly one schema but matched multiple"},
		{"POST", "changes", edits(``), nil, 422, "edits"},
		{"POST", "changes?dry-run", s1(`"remove":true`), nil, 422, "query.dry-run"},
		{"POST", "changes?dryrun=true", s1(`"remove":true`), nil, 422, "dryrun"},
		{"POST", "changes", `{`, nil, 400, ""},
		{"POST", "changes", edits(s3), []string{"Content-Type", "text/plain"}, 415, "text/plain"},
		{"PATCH", "self", `{"drained":true}`, []string{"Content-Type", "text/plain"}, 415, "text/plain"},
		{"POST", "changes", strings.Repeat(" ", mostBytes+1), nil, 413, ""},
		{"PUT", "services", strings.Repeat(" ", mostBytes+1), []string{"Content-Type", "application/yaml"}, 413, ""},
		{"PATCH", "self", strings.Repeat(" ", 1<<20+1), nil, 413, ""},
		{"PUT", "services", other, []string{"Content-Type", "application/yaml"}, 409, "the file would remove 1 of 1 server of quic, 2 of 2 servers of web, and the limit is 30 percent"},
		{"PUT", "services?dry-run=true", other, []string{"Content-Type", "application/yaml"}, 409, "allow-removals"},
		{"PUT", "services?allow-removals", other, []string{"Content-Type", "application/yaml"}, 422, "query.allow-removals"},
		{"PUT", "services?allow-removals=true", other, []string{"Content-Type", "application/yaml"}, 200, `"kind":"services_removed","items":["web","quic"]`},
		{"PUT", "services", file, []string{"Content-Type", "application/yaml"}, 409, "would remove 1 of 1 server of other"},
		{"POST", "changes", edits(`{"service":"other","reset":true},{"service":"web","reset":true},{"service":"quic","reset":true}`), nil, 200, "services_added"},
		{"PUT", "services", bomb, []string{"Content-Type", "application/yaml"}, 422, "line 6: the file is too large"},
		{"PUT", "services", "services: [", []string{"Content-Type", "application/yaml"}, 422, "line 2"},
		{"GET", "nothing", "", nil, 404, `"status":404,"detail":"the process runs version`},
		{"DELETE", "overrides", "", nil, 405, `"status":405,"detail":"/v1/overrides takes GET, HEAD, not DELETE"`},
		{"GET", "overrides", "", nil, 200, none},
		{"POST", "changes", edits(`{"service":"web","set":{"buckets":1048576}}`), nil, 200, "web (buckets)"},
		{"POST", "reload", "", nil, 200, `"warnings":[]`}, // it reads what the change has stored
	} {
		status, answer := send(t, step.method, url+step.path, step.body, step.headers...)
		if status != step.status || !strings.Contains(answer, step.answer) {
			t.Errorf("step %d: %s %s %s: %d %s\nwant %d %s", i, step.method, step.path, step.body, status, answer,
				step.status, step.answer)
		}
	}
}

// Flows count as live until they are closing. The flows of services without a flow table are
// unknown.
func TestServicesOfAPI(t *testing.T) {
	t.Parallel()
	age := 2.5
	state := func(name string, persistence desired.Persistence) *inspect.ServiceState {
		return &inspect.ServiceState{Name: name, TakesFlows: true, Persistence: persistence,
			Servers: []*inspect.ServerState{{Name: "s1", Condition: inspect.ServerUnchecked,
				Flows: &dataplane.FlowCounts{New: 1, Established: 2, Silent: 3, Closing: 4}}}}
	}
	snapshot := &inspect.Snapshot{
		FlowTable: inspect.FlowTable{Age: &age},
		Services: []*inspect.ServiceState{
			state("web", desired.PersistenceTable), state("quic", desired.PersistenceStateless),
		},
	}
	status, answer := send(t, http.MethodGet, serve(t, snapshot).URL+"/v1/services", "")
	var services []Service
	if err := json.Unmarshal([]byte(answer), &services); status != 200 || err != nil || len(services) != 2 {
		t.Fatalf("%d, %v: %s", status, err, answer)
	}
	s := services[0].Servers[0]
	if s.Name != "s1" || s.Weight != 3 || s.Flows == nil || *s.Flows != (Flows{Live: 6, Closing: 4, Age: 2.5}) {
		t.Errorf("%s", answer)
	}
	if services[1].Servers[0].Flows != nil {
		t.Errorf("flows of a service without a flow table: %s", answer)
	}
}

// A request reads only the services that it is about.
func TestServicesThatAreRead(t *testing.T) {
	t.Parallel()
	all := []string{"quic", "web"}
	var read []string
	handler := Balancer{
		Control: loadBalancer(t),
		Source: func(wanted func(string) bool) (*inspect.Snapshot, error) {
			snapshot := &inspect.Snapshot{}
			for _, name := range all {
				if wanted(name) {
					read = append(read, name)
					snapshot.Services = append(snapshot.Services, &inspect.ServiceState{Name: name})
				}
			}
			return snapshot, nil
		},
	}.Handler()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	for path, want := range map[string][]string{
		"/v1/services":           all,
		"/v1/services?name=web":  {"web"},
		"/v1/services?name=none": nil,
		"/v1/self":               nil,
	} {
		read = nil
		status, answer := send(t, http.MethodGet, server.URL+path, "")
		if status != 200 || !slices.Equal(read, want) {
			t.Errorf("%s: %d, read %v, want %v", path, status, read, want)
		}
		for _, name := range all {
			if strings.Contains(answer, `"`+name+`"`) != slices.Contains(want, name) {
				t.Errorf("%s: %s", path, answer)
			}
		}
	}
}

// The answer to a change tells the flows that lose their server.
func TestLosses(t *testing.T) {
	t.Parallel()
	url := serve(t, &inspect.Snapshot{}).URL + "/v1/changes"
	const want = `"losses":[{"service":"web","server":"s1","cause":"removed","flows":12}]`
	edit := `{"edits":[{"service":"web","server":"s1","remove":true}]}`
	if _, answer := send(t, http.MethodPost, url+"?dry-run=true", edit); !strings.Contains(answer, want) {
		t.Errorf("%s, want %s", answer, want)
	}
	edit = `{"edits":[{"service":"web","server":"s1","set":{"drained":true}}]}`
	if _, answer := send(t, http.MethodPost, url, edit); !strings.Contains(answer, `"losses":[]`) {
		t.Error(answer)
	}
}

// redirected sends all requests to a test's server.
type redirected struct{ server *httptest.Server }

func (r redirected) RoundTrip(request *http.Request) (*http.Response, error) {
	request.URL.Host = r.server.Listener.Addr().String()
	return http.DefaultTransport.RoundTrip(request)
}

func TestDocument(t *testing.T) {
	t.Parallel()
	for role, url := range map[string]string{
		"balancer": serve(t, &inspect.Snapshot{}).URL, "agent": serveAgent(t).URL,
	} {
		status, answer := send(t, http.MethodGet, url+"/openapi.json", "")
		var document struct {
			OpenAPI string `json:"openapi"`
			Paths   map[string]map[string]any
		}
		if err := json.Unmarshal([]byte(answer), &document); status != 200 || err != nil {
			t.Fatalf("%s: %d, %v", role, status, err)
		}
		if !strings.HasPrefix(document.OpenAPI, "3.1.") {
			t.Errorf("%s: version %s", role, document.OpenAPI)
		}
		for _, path := range []string{"/v1/services", "/v1/overrides", "/v1/changes", "/v1/events", "/v1/reload", "/v1/instance"} {
			if document.Paths[path] == nil {
				t.Errorf("%s: the document has no %s", role, path)
			}
		}
		// A file can remove too much from both roles, and edits only from a balancer with a store.
		if got, want := strings.Count(answer, `"allow-removals"`), map[string]int{"balancer": 2, "agent": 1}[role]; got != want {
			t.Errorf("%s: %d operations permit removals, want %d", role, got, want)
		}
		_, answer = send(t, http.MethodGet, url+"/v1/instance", "")
		if !strings.Contains(answer, `"role":"`+role+`"`) {
			t.Errorf("the instance of a %s: %s", role, answer)
		}
	}
}

// The socket of a killed process is replaced. Only the owner and the group may use it.
func TestListenAt(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "edge.sock")
	killed, err := net.Listen("unix", path)
	testhost.Must(t, err)
	killed.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = killed.Close()
	listener, err := listenAt(path, "")
	testhost.Must(t, err)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("%v, %v", info, err)
	}
	if own := info.Sys().(*syscall.Stat_t).Gid; int(own) != os.Getegid() {
		t.Errorf("the socket has the group %d, and the process %d", own, os.Getegid())
	}
	_ = listener.Close()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("after the end: %v", err)
	}
	requireGroup(t, path)
	if _, err := listenAt(path, "no-such-group"); err == nil || !strings.Contains(err.Error(), `api.group "no-such-group"`) {
		t.Errorf("error %v", err)
	}
}

// requireGroup requires that listenAt gives a socket to a group other than that of the process.
func requireGroup(t *testing.T, path string) {
	t.Helper()
	const name = "daemon" // a group that each Linux system has
	group, err := user.LookupGroup(name)
	if err != nil || os.Geteuid() != 0 {
		t.Logf("cannot give a socket to the group %s: %v, user %d", name, err, os.Geteuid())
		return
	}
	listener, err := listenAt(path, name)
	testhost.Must(t, err)
	defer listener.Close()
	info, err := os.Stat(path)
	testhost.Must(t, err)
	if gid := strconv.Itoa(int(info.Sys().(*syscall.Stat_t).Gid)); gid != group.Gid || info.Mode().Perm() != 0o660 {
		t.Errorf("the socket has the group %s and mode %v, want group %s", gid, info.Mode(), group.Gid)
	}
}

// A process of an earlier build runs on after an upgrade, and does not know all requests.
func TestOtherBuild(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.NewServeMux())
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: *server.Client()}
	client.http.Transport = redirected{server}
	_, err := client.Identify(t.Context())
	const want = `instance "edge" does not know the request GET /v1/instance: its process runs another build; restart it`
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestNoProcess(t *testing.T) {
	t.Parallel()
	_, err := NewClient("api-test-none").Services(t.Context())
	if err == nil || !strings.Contains(err.Error(), `no process runs the instance "api-test-none"`) {
		t.Errorf("error %v", err)
	}
}

// The handler knows the user at the other end of the socket.
func TestPeer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "edge.sock")
	listener, err := net.Listen("unix", path)
	testhost.Must(t, err)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- (&Socket{slog.New(slog.DiscardHandler), listener}).Run(ctx, http.HandlerFunc(
			func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, events.ActorOf(r.Context())) }))
	}()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial}}
	response, err := client.Get("http://segue/")
	testhost.Must(t, err)
	text, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if want := events.User(uint32(os.Getuid())); err != nil || string(text) != want {
		t.Errorf("%q, error %v, want %q", text, err, want)
	}
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
