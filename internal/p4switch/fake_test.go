// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// fake is a switch without a data plane: it keeps entries as P4Runtime 1.4 demands (section 9.1).
type fake struct {
	p4v1.UnimplementedP4RuntimeServer
	t       testing.TB
	address string
	options []grpc.ServerOption
	server  *grpc.Server
	socket  net.Listener

	mu      sync.Mutex
	program *program
	config  *p4v1.ForwardingPipelineConfig
	highest uint64 // the highest election ID so far
	// primary is the stream of the primary controller; nil: there is none.
	primary p4v1.P4Runtime_StreamChannelServer
	streams []p4v1.P4Runtime_StreamChannelServer
	tables  map[string]string            // values by table and key
	counts  map[string]*p4v1.CounterData // by counter and index
	writes  int                          // updates that it has made
	silent  bool                         // it does not answer to announced election IDs
	most    int                          // it refuses updates beyond that number; negative: none
	changed func()                       // called after each update; may be nil
}

func startFake(t testing.TB) *fake {
	t.Helper()
	return startFakeAt(t, "unix:"+filepath.Join(t.TempDir(), "switch"))
}

func startFakeAt(t testing.TB, address string, options ...grpc.ServerOption) *fake {
	t.Helper()
	f := &fake{
		t: t, tables: map[string]string{}, counts: map[string]*p4v1.CounterData{}, most: -1,
		address: address, options: options,
	}
	var err error
	f.program, err = ours()
	testhost.Must(t, err)
	f.start()
	t.Cleanup(f.stop)
	return f
}

// start makes the switch serve again, after stop.
func (f *fake) start() {
	f.t.Helper()
	var err error
	if path, isSocket := strings.CutPrefix(f.address, "unix:"); isSocket {
		f.socket, err = net.Listen("unix", path)
		testhost.Must(f.t, err)
	} else {
		f.socket, err = net.Listen("tcp", f.address)
		testhost.Must(f.t, err)
		f.address = f.socket.Addr().String()
	}
	f.server = grpc.NewServer(f.options...)
	p4v1.RegisterP4RuntimeServer(f.server, f)
	server, socket := f.server, f.socket
	go func() { _ = server.Serve(socket) }()
}

// stop closes the socket itself, too: the server does not know it before Serve has begun.
func (f *fake) stop() {
	f.server.Stop()
	_ = f.socket.Close()
}

// open connects a controller.
func (f *fake) open(election uint64) *Switch {
	f.t.Helper()
	client, err := Dial(context.Background(), &desired.Switch{Address: f.address, ElectionID: election})
	testhost.Must(f.t, err)
	s, err := Open(f.t.Context(), client)
	testhost.Must(f.t, err)
	f.t.Cleanup(func() { testhost.Must(f.t, s.Close()) })
	return s
}

func (f *fake) StreamChannel(stream p4v1.P4Runtime_StreamChannelServer) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			f.forget(stream)
			return err
		}
		if f.silent {
			continue
		}
		if err := f.arbitrate(stream, request.GetArbitration().GetElectionId().GetLow()); err != nil {
			return err
		}
	}
}

// arbitrate tells a controller whether it is the primary one. If it is, the others are not.
func (f *fake) arbitrate(stream p4v1.P4Runtime_StreamChannelServer, id uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := func(code codes.Code) *p4v1.StreamMessageResponse {
		return &p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Arbitration{
			Arbitration: &p4v1.MasterArbitrationUpdate{
				Status: &rpcstatus.Status{Code: int32(code)}, ElectionId: &p4v1.Uint128{Low: f.highest},
			},
		}}
	}
	if !slices.Contains(f.streams, stream) {
		f.streams = append(f.streams, stream)
	}
	switch {
	case id < f.highest && f.primary == nil:
		return stream.Send(answer(codes.NotFound))
	case id < f.highest:
		return stream.Send(answer(codes.AlreadyExists))
	}
	f.highest, f.primary = id, stream
	for _, other := range f.streams {
		if other != stream {
			_ = other.Send(answer(codes.AlreadyExists))
		}
	}
	return stream.Send(answer(codes.OK))
}

// forget notes that a controller has gone.
func (f *fake) forget(stream p4v1.P4Runtime_StreamChannelServer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streams = slices.DeleteFunc(f.streams, func(s p4v1.P4Runtime_StreamChannelServer) bool { return s == stream })
	if f.primary == stream {
		f.primary = nil
	}
}

func (f *fake) GetForwardingPipelineConfig(
	context.Context, *p4v1.GetForwardingPipelineConfigRequest,
) (*p4v1.GetForwardingPipelineConfigResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.config == nil {
		return nil, status.Error(codes.FailedPrecondition, "no program")
	}
	return &p4v1.GetForwardingPipelineConfigResponse{Config: f.config}, nil
}

func (f *fake) SetForwardingPipelineConfig(
	_ context.Context, r *p4v1.SetForwardingPipelineConfigRequest,
) (*p4v1.SetForwardingPipelineConfigResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.ElectionId.GetLow() != f.highest {
		return nil, status.Error(codes.PermissionDenied, "not primary")
	}
	f.config, f.tables = r.Config, map[string]string{}
	return &p4v1.SetForwardingPipelineConfigResponse{}, nil
}

func (f *fake) Write(_ context.Context, r *p4v1.WriteRequest) (*p4v1.WriteResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.ElectionId.GetLow() != f.highest {
		return nil, status.Error(codes.PermissionDenied, "not primary")
	}
	results := make([]*p4v1.Error, len(r.Updates))
	failed := false
	for i, u := range r.Updates {
		code := f.update(u)
		failed = failed || code != codes.OK
		results[i] = &p4v1.Error{CanonicalCode: int32(code), Message: code.String()}
	}
	if !failed {
		return &p4v1.WriteResponse{}, nil
	}
	failure := status.New(codes.Unknown, "some updates failed")
	for _, result := range results {
		var err error
		if failure, err = failure.WithDetails(result); err != nil {
			return nil, err
		}
	}
	return nil, failure.Err()
}

func (f *fake) update(u *p4v1.Update) codes.Code {
	m := u.GetEntity().GetTableEntry()
	if f.most >= 0 && f.writes >= f.most {
		return codes.ResourceExhausted
	}
	table := f.program.byID.tables[m.TableId]
	if table == nil || m.IsDefaultAction != (len(table.MatchFields) == 0) || !fits(table, m) {
		return codes.InvalidArgument
	}
	e, err := f.program.entry(m)
	if err != nil || e.Action == "" && u.Type != p4v1.Update_DELETE {
		return codes.InvalidArgument
	}
	name := table.Preamble.Alias + " " + e.key()
	_, isThere := f.tables[name]
	switch {
	case u.Type == p4v1.Update_INSERT && isThere:
		return codes.AlreadyExists
	case u.Type != p4v1.Update_INSERT && !isThere && !m.IsDefaultAction:
		return codes.NotFound
	case u.Type == p4v1.Update_DELETE:
		delete(f.tables, name)
	default:
		f.tables[name] = e.value()
	}
	f.writes++
	if f.changed != nil {
		f.changed()
	}
	return codes.OK
}

// fits tells whether the values of an entry fit the widths of the table's fields.
func fits(table *configv1.Table, m *p4v1.TableEntry) bool {
	for i, match := range m.Match {
		value, bits := Value(match.GetExact().GetValue()), int(table.MatchFields[i].Bitwidth)
		if len(value) == 0 || len(value) > 1 && value[0] == 0 || len(value) > (bits+7)/8 {
			return false
		}
	}
	return true
}

func (f *fake) Read(r *p4v1.ReadRequest, stream p4v1.P4Runtime_ReadServer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := &p4v1.ReadResponse{}
	for _, wanted := range r.Entities {
		if counter := wanted.GetCounterEntry(); counter != nil {
			data := f.counts[fmt.Sprint(counter.CounterId, counter.Index.Index)]
			answer.Entities = append(answer.Entities, &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{
				CounterEntry: &p4v1.CounterEntry{CounterId: counter.CounterId, Index: counter.Index, Data: data},
			}})
			continue
		}
		if err := f.readTable(wanted.GetTableEntry(), answer); err != nil {
			return err
		}
	}
	return stream.Send(answer)
}

// readTable adds the entries of a table to an answer, or the one with the wanted key.
func (f *fake) readTable(wanted *p4v1.TableEntry, answer *p4v1.ReadResponse) error {
	alias := f.program.byID.tables[wanted.TableId].Preamble.Alias
	key := ""
	if len(wanted.Match) > 0 {
		e, err := f.program.entry(wanted)
		if err != nil {
			return err
		}
		key = e.key()
	}
	for name, value := range f.tables {
		its, isIn := strings.CutPrefix(name, alias+" ")
		if !isIn || key != "" && its != key {
			continue
		}
		action, params := unpack(value)
		m, err := f.program.message(&Entry{alias, unpackValues(its), action, params})
		if err != nil {
			return err
		}
		answer.Entities = append(answer.Entities, &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: m}})
	}
	return nil
}

// set sets a counter.
func (f *fake) set(counter string, index, packets, bytes int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[fmt.Sprint(f.program.counters[counter].Preamble.Id, index)] =
		&p4v1.CounterData{PacketCount: packets, ByteCount: bytes}
}
