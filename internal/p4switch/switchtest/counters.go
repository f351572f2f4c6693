// SPDX-License-Identifier: Apache-2.0

package switchtest

import (
	"context"
	"errors"
	"io"
	"testing"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/p4"
)

// Count is the value of a counter.
type Count struct{ Packets, Bytes int64 }

// counters reads the counters of a switch.
type counters struct {
	stub p4v1.P4RuntimeClient
	ids  map[string]uint32 // by name
}

func newCounters(t testing.TB, address string) *counters {
	t.Helper()
	info := &configv1.P4Info{}
	testhost.Must(t, prototext.Unmarshal(p4.Info, info))
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testhost.Must(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	c := &counters{p4v1.NewP4RuntimeClient(connection), map[string]uint32{}}
	for _, counter := range info.Counters {
		c.ids[counter.Preamble.Alias] = counter.Preamble.Id
	}
	return c
}

// Counts returns the values of an array of counters that are not 0, by index.
func (s *Switch) Counts(t testing.TB, name string) map[int64]Count {
	t.Helper()
	stream, err := s.counters.stub.Read(context.Background(), &p4v1.ReadRequest{Entities: []*p4v1.Entity{
		{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: s.counters.ids[name]}}},
	}})
	testhost.Must(t, err)
	counts := map[int64]Count{}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return counts
		}
		testhost.Must(t, err)
		for _, entity := range answer.Entities {
			entry := entity.GetCounterEntry()
			if count := (Count{entry.GetData().GetPacketCount(), entry.GetData().GetByteCount()}); count != (Count{}) {
				counts[entry.GetIndex().GetIndex()] = count
			}
		}
	}
}
