// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/danielgtaylor/huma/v2/sse"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/runstate"
	"github.com/segue-lb/segue/internal/version"
)

// requestTimeout bounds the time of a request. A reload takes at most two seconds and the time to
// build tables.
const requestTimeout = time.Minute

// Socket serves the API of a balancer.
type Socket struct {
	log      *slog.Logger
	listener net.Listener
}

// Source reads the state of a balancer in the data path.
type Source func() (*inspect.Snapshot, error)

// Listen opens the socket of an instance. Members of the group may use it; without a group only
// root may. Listen returns an error if there is no such group, or if the socket cannot be opened.
// A caller that never calls Run must call Close.
func Listen(instance, group string, log *slog.Logger) (*Socket, error) {
	path := runstate.SocketFile(instance)
	listener, err := listenAt(path, group)
	if err != nil {
		return nil, fmt.Errorf("open the socket %s: %w", path, err)
	}
	return &Socket{log: log, listener: listener}, nil
}

// listenAt opens a socket. The caller holds the lock of the instance, so a socket that is there is
// that of a process that was killed.
func listenAt(path, group string) (net.Listener, error) {
	id, err := groupID(group)
	if err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// Nobody else may use the socket before its group is set. Files that other goroutines make at
	// this moment are restricted, too.
	before := unix.Umask(0o177)
	listener, err := net.Listen("unix", path)
	unix.Umask(before)
	if err != nil {
		return nil, err
	}
	err = os.Chown(path, -1, id)
	if err == nil {
		err = os.Chmod(path, 0o660)
	}
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

func groupID(name string) (int, error) {
	if name == "" {
		return 0, nil
	}
	group, err := user.LookupGroup(name)
	if err != nil {
		return 0, fmt.Errorf("api.group %q: %w", name, err)
	}
	return strconv.Atoi(group.Gid)
}

// Close closes the socket and removes it.
func (s *Socket) Close() error { return s.listener.Close() }

// Balancer is the running balancer that the socket gives access to.
type Balancer struct {
	Control *control.Controller
	Source  Source
	// Reload reads the files again, as SIGHUP does.
	Reload func(context.Context) (field.Errors, error)
	Events *events.Stream
}

// Run answers requests until the context ends.
func (s *Socket) Run(ctx context.Context, b Balancer) error {
	server := &http.Server{
		Handler:           Handler(b),
		ReadHeaderTimeout: requestTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	if err := daemon.ServeHTTP(ctx, server, s.listener); err != nil {
		return fmt.Errorf("socket %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// balancerAPI has the operations.
type balancerAPI struct {
	Balancer
	reading sync.Mutex // one request at a time uses the source
}

func (b *balancerAPI) snapshot() (*inspect.Snapshot, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	return b.Source()
}

// mostBytes bounds the size of a request: 100,000 servers need about 10 MB.
const mostBytes = 32 << 20

// Handler returns the handler of all operations.
func Handler(balancer Balancer) http.Handler {
	mux := http.NewServeMux()
	settings := huma.DefaultConfig("Segue balancer", version.String())
	settings.DocsPath = "" // it would load a program from elsewhere
	settings.RejectUnknownQueryParameters = true
	settings.CreateHooks = nil
	api := humago.New(mux, settings)
	b := &balancerAPI{Balancer: balancer}
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services and their servers",
		Errors:  []int{http.StatusServiceUnavailable},
	}, b.listServices)
	huma.Register(api, huma.Operation{
		OperationID: "list-overrides", Method: http.MethodGet, Path: "/v1/overrides",
		Summary: "List overrides, also those of servers that do not exist",
	}, b.listOverrides)
	errorsOfChange := []int{
		http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
		http.StatusNotFound, http.StatusConflict, http.StatusPreconditionFailed,
		http.StatusServiceUnavailable,
	}
	huma.Register(api, huma.Operation{
		OperationID: "change", Method: http.MethodPost, Path: "/v1/changes",
		Summary: "Add, set, remove and reset services and servers, in one transaction",
		Errors:  errorsOfChange, MaxBodyBytes: mostBytes,
	}, b.change)
	huma.Register(api, huma.Operation{
		OperationID: "apply", Method: http.MethodPut, Path: "/v1/services",
		Summary: "Make the services those of a configuration file, in one transaction",
		Description: "Servers that an override drains stay drained. Other sections of the file have no " +
			"effect.",
		Errors: errorsOfChange, MaxBodyBytes: mostBytes,
	}, b.applyFile)
	huma.Register(api, huma.Operation{
		OperationID: "reload", Method: http.MethodPost, Path: "/v1/reload",
		Summary: "Read the configuration file and the file of overrides again",
		Errors:  []int{http.StatusServiceUnavailable},
	}, b.reload)
	sse.Register(api, huma.Operation{
		OperationID: "watch-events", Method: http.MethodGet, Path: "/v1/events",
		Summary: "Follow the events of the balancer, as server-sent events",
		Description: "Begins after the event in Last-Event-ID, or with the next event. A reader that misses " +
			"events sees a gap between their numbers. The balancer keeps at least the last 3,000.",
	}, map[string]any{"message": events.Event{}}, b.watchEvents)
	return withoutReadDeadline(mux, "/v1/events")
}

// withoutReadDeadline lets requests for a path last longer than the server's timeout.
func withoutReadDeadline(handler http.Handler, path string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == path {
			// The server's connections have deadlines. Those of tests may not, and need none.
			_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		}
		handler.ServeHTTP(w, r)
	})
}

type body[T any] struct{ Body T }

func (b *balancerAPI) listOverrides(context.Context, *struct{}) (*body[Overrides], error) {
	list, version := b.Control.Overrides()
	return &body[Overrides]{Overrides{version, overridesOf(list)}}, nil
}

// Terms are the conditions of a change. It is exported because the library cannot set the fields of
// an unexported embedded type.
type Terms struct {
	Version string `header:"If-Match" doc:"the version that must be in force; without it, any"`
	DryRun  bool   `query:"dry-run" doc:"tell what would change, and change nothing"`
}

// Resolve refuses "?dry-run" without a value. The library would take it for false, and make the
// change.
func (*Terms) Resolve(r huma.Context) []error {
	url := r.URL()
	if values, ok := url.Query()["dry-run"]; ok && slices.Contains(values, "") {
		return []error{&huma.ErrorDetail{Location: "query.dry-run", Message: "must be true or false", Value: ""}}
	}
	return nil
}

type changeRequest struct {
	Terms
	Body Change
}

func (b *balancerAPI) change(ctx context.Context, r *changeRequest) (*body[Changed], error) {
	return changed(b.Control.Change(ctx, editsOf(r.Body.Edits), control.Terms(r.Terms)))
}

type applyRequest struct {
	Terms
	RawBody []byte `contentType:"application/yaml"`
}

func (b *balancerAPI) applyFile(ctx context.Context, r *applyRequest) (*body[Changed], error) {
	return changed(b.Control.ApplyFile(ctx, r.RawBody, control.Terms(r.Terms)))
}

func changed(result *control.Result, err error) (*body[Changed], error) {
	if err != nil {
		return nil, refusal(err)
	}
	answer := Changed{
		Version: result.Version, Changes: []Difference{}, Losses: []Loss{},
		Warnings: textsOf(result.Warnings),
	}
	for _, c := range result.Changes {
		answer.Changes = append(answer.Changes, Difference{c.What, c.Names})
	}
	for _, l := range result.Losses {
		answer.Losses = append(answer.Losses, Loss{l.Service, l.Server, string(l.Cause), l.Flows})
	}
	return &body[Changed]{answer}, nil
}

type eventsRequest struct {
	After uint64 `header:"Last-Event-ID" doc:"the number of the last event that the reader has got"`
}

// watchEvents sends events until the reader goes away.
func (b *balancerAPI) watchEvents(ctx context.Context, r *eventsRequest, send sse.Sender) {
	after := r.After
	if after == 0 {
		after = b.Events.Last()
	}
	for {
		list, err := b.Events.After(ctx, after)
		if err != nil {
			return
		}
		for _, e := range list {
			if after = e.ID; send(sse.Message{ID: int(e.ID), Data: e}) != nil {
				return
			}
		}
	}
}

func (b *balancerAPI) reload(ctx context.Context, _ *struct{}) (*body[Reloaded], error) {
	warnings, err := b.Reload(ctx)
	if err != nil {
		return nil, refusal(err)
	}
	_, version := b.Control.Overrides()
	return &body[Reloaded]{Reloaded{version, textsOf(warnings)}}, nil
}

// refusal returns the answer to a change that was refused.
func refusal(err error) error {
	var problems field.Errors
	switch {
	case errors.Is(err, control.ErrVersion):
		return huma.Error412PreconditionFailed(err.Error())
	case errors.Is(err, control.ErrStored), errors.Is(err, control.ErrExists):
		return huma.Error409Conflict(err.Error())
	case errors.Is(err, control.ErrNotFound):
		return huma.Error404NotFound(err.Error())
	case errors.As(err, &problems):
		return huma.Error422UnprocessableEntity(err.Error())
	}
	return huma.Error503ServiceUnavailable(err.Error())
}

func textsOf(problems field.Errors) []string {
	texts := []string{}
	for _, p := range problems {
		texts = append(texts, p.Error())
	}
	return texts
}

func (b *balancerAPI) listServices(context.Context, *struct{}) (*body[[]Service], error) {
	snapshot, err := b.snapshot()
	if err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	cfg := b.Control.Desired()
	overrides := map[string]string{}
	for _, o := range cfg.Overrides {
		overrides[o.Target()] = o.Does()
	}
	services := []Service{}
	for _, s := range snapshot.Services {
		c := cfg.Service(s.Name)
		if c == nil {
			continue // it was removed at this moment
		}
		service := Service{
			Name: s.Name, VIP: c.VIP.String(), Port: c.Port.String(), Protocol: string(c.Protocol),
			Placement: string(c.Placement), Persistence: string(c.Persistence),
			Encapsulation: string(c.Encapsulation),
			TakesFlows:    s.TakesFlows, Servers: []Server{},
			HasFlowTable: s.Persistence == desired.PersistenceTable,
			Override:     overrides[s.Name],
		}
		servers := map[string]*desired.Server{}
		for i := range c.Servers {
			servers[c.Servers[i].Name] = &c.Servers[i]
		}
		for _, state := range s.Servers {
			server := Server{
				Name: state.Name, Address: state.Address, Condition: string(state.Condition),
				Flows: flowsOf(snapshot, s, state), Override: overrides[s.Name+"/"+state.Name],
			}
			if c := servers[state.Name]; c != nil {
				server.Drained, server.Weight = c.Drained, *c.Weight
			}
			service.Servers = append(service.Servers, server)
		}
		services = append(services, service)
	}
	return &body[[]Service]{services}, nil
}

// flowsOf returns the flows of a server, or nil if they are not known.
func flowsOf(of *inspect.Snapshot, service *inspect.ServiceState, server *inspect.ServerState) *Flows {
	if service.Persistence != desired.PersistenceTable || server.Flows == nil || of.FlowTable.Age == nil {
		return nil
	}
	f := &Flows{
		Live:    server.Flows.Total() - server.Flows.Closing,
		Closing: server.Flows.Closing, Age: *of.FlowTable.Age,
	}
	if server.Hunt != nil && server.Hunt.HalfOpen != nil {
		f.Live += *server.Hunt.HalfOpen
	}
	return f
}
