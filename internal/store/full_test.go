// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// full is a store that answers each change by the error of a full store. If makes is true, it also
// makes the change.
type full struct {
	pb.UnimplementedKVServer
	behind pb.KVClient
	makes  bool
}

func (f *full) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return f.behind.Range(ctx, r)
}

func (f *full) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if len(r.Success) == 0 {
		return f.behind.Txn(ctx, r)
	}
	if f.makes {
		if _, err := f.behind.Txn(ctx, r); err != nil {
			return nil, err
		}
	}
	return nil, rpctypes.ErrGRPCNoSpace
}

// serve serves a full store, and returns its URL.
func (f *full) serve(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	server := grpc.NewServer()
	pb.RegisterKVServer(server, f)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return "http://" + listener.Addr().String()
}

// A transaction that crosses the quota of the store is made, and its answer is the error of a full
// store. The writer finds out whether the change was made.
func TestFullStore(t *testing.T) {
	t.Parallel()
	for name, makes := range map[string]bool{"makes the change": true, "refuses the change": false} {
		t.Run(name, func(t *testing.T) {
			server := etcdtest.Start(t)
			l := &lossy{fleet: newFleet(t, server.Endpoint())}
			before := l.fill(service("web", 4))
			front := &full{behind: pb.NewKVClient(server.Client().ActiveConnection()), makes: makes}
			l.far = open(t, front.serve(t), "far")
			version, err := l.drain(t.Context(), before, func() {})
			now, drained := l.version()
			switch {
			case makes && (err != nil || version != now || now == before || len(drained) != 1):
				t.Errorf("version %s, error %v; the store has version %s, with %v drained", version, err, now, drained)
			case !makes && (!errors.Is(err, errFull) || errors.Is(err, ErrUnknown) || now != before):
				t.Errorf("error %v; the store has version %s, and had %s", err, now, before)
			}
		})
	}
}

// etcd refuses changes above its quota, small ones and those of many keys. The store then is as
// before, and the error says why.
func TestQuota(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t, "--quota-backend-bytes=1000000")
	f := newFleet(t, server.Endpoint())
	before := f.fill(service("web", 4))
	client := server.Client()
	for i := 0; ; i++ {
		_, err := client.Put(t.Context(), fmt.Sprint("other", i), strings.Repeat("x", 100<<10))
		if errors.Is(err, rpctypes.ErrNoSpace) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for name, edit := range map[string]func(Tree) (Tree, error){
		"of a key":     func(t Tree) (Tree, error) { drain("web", "s1")(t); return t, nil },
		"of many keys": replace(service("web", 1000)),
	} {
		_, err := f.store.Apply(t.Context(), Change{Edit: edit})
		if !errors.Is(err, errFull) || errors.Is(err, ErrUnknown) {
			t.Errorf("a change %s: error %v", name, err)
		}
	}
	if n, err := f.store.Read(t.Context()); err != nil || n.Version() != before {
		t.Errorf("the store has version %s, error %v", n.Version(), err)
	}
}
