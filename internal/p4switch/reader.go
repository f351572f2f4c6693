// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tlsfiles"
	"github.com/segue-lb/segue/p4"
)

// longestMessage is the longest message that a reader takes, in bytes. A switch may answer with all
// entries of a table in one message. By default, gRPC takes 4 MB.
const longestMessage = 1 << 30

// silence says when a switch counts as lost that is not heard. Without it, the kernel notices after 15
// minutes if there is something to send, and after two hours if not. Servers of gRPC close a connection
// with more than one ping in five minutes.
var silence = keepalive.ClientParameters{Time: 6 * time.Minute, Timeout: 10 * time.Second}

// Reader reads what a switch has. It need not be the primary controller, and does not take part in
// the election. Several goroutines may use it.
type Reader struct {
	connection *grpc.ClientConn
	stub       p4v1.P4RuntimeClient
	program    *program
	device     uint64
}

// NewReader returns a reader of a switch. It connects when it is used. It returns an error if a file
// of the configuration cannot be used.
func NewReader(to *desired.Switch) (*Reader, error) {
	program, err := ours()
	if err != nil {
		return nil, err
	}
	security, err := credentialsOf(to)
	if err != nil {
		return nil, err
	}
	connection, err := grpc.NewClient(to.Address, grpc.WithTransportCredentials(security),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(longestMessage)), grpc.WithKeepaliveParams(silence))
	if err != nil {
		return nil, fmt.Errorf("node.switch.address %q: %w", to.Address, err)
	}
	return &Reader{connection, p4v1.NewP4RuntimeClient(connection), program, to.Device}, nil
}

func credentialsOf(to *desired.Switch) (credentials.TransportCredentials, error) {
	if !to.UsesTLS() {
		return insecure.NewCredentials(), nil
	}
	settings, err := tlsfiles.Client("node.switch", &to.TLSFiles)
	if err != nil {
		return nil, err
	}
	return credentials.NewTLS(settings), nil
}

// Close ends the connection.
func (r *Reader) Close() error { return r.connection.Close() }

// runsProgram tells whether the switch runs the program of this build.
func (r *Reader) runsProgram(ctx context.Context) (bool, error) {
	answer, err := r.stub.GetForwardingPipelineConfig(ctx, &p4v1.GetForwardingPipelineConfigRequest{
		DeviceId: r.device, ResponseType: p4v1.GetForwardingPipelineConfigRequest_P4INFO_AND_COOKIE,
	})
	if status.Code(err) == codes.FailedPrecondition { // it runs no program yet
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the program of the switch: %w", err)
	}
	config := answer.GetConfig()
	return proto.Equal(config.GetP4Info(), r.program.info) && config.GetCookie().GetCookie() == cookie(), nil
}

// cookie identifies the program of this build. Builds whose programs differ can have the same tables.
func cookie() uint64 {
	sum := sha256.Sum256(p4.Config)
	return binary.BigEndian.Uint64(sum[:])
}

// Read calls found for each entry of a table, in any order. For a table without a key, that is its
// default action. For others, it leaves out the default action.
func (r *Reader) Read(ctx context.Context, table string, found func(Entry)) error {
	t := r.program.tables[table]
	if t == nil {
		return fmt.Errorf("the program has no table %s", table)
	}
	all := &p4v1.TableEntry{TableId: t.Preamble.Id, IsDefaultAction: len(t.MatchFields) == 0}
	return r.readEntries(ctx, all, found)
}

// Lookup returns the entry of a table that a key matches, or nil if there is none.
func (r *Reader) Lookup(ctx context.Context, table string, key ...Value) (found *Entry, err error) {
	wanted, err := r.program.message(&Entry{Table: table, Key: key})
	if err != nil {
		return nil, err
	}
	err = r.readEntries(ctx, wanted, func(e Entry) { found = &e })
	return found, err
}

func (r *Reader) readEntries(ctx context.Context, wanted *p4v1.TableEntry, found func(Entry)) error {
	entity := &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: wanted}}
	err := r.read(ctx, []*p4v1.Entity{entity}, func(entity *p4v1.Entity) error {
		e, err := r.program.entry(entity.GetTableEntry())
		if err == nil {
			found(e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("table %s: %w", r.program.byID.tables[wanted.TableId].Preamble.Alias, err)
	}
	return nil
}

// read calls found for each entity with which the switch answers, until it returns an error.
func (r *Reader) read(ctx context.Context, wanted []*p4v1.Entity, found func(*p4v1.Entity) error) error {
	stream, err := r.stub.Read(ctx, &p4v1.ReadRequest{DeviceId: r.device, Entities: wanted})
	if err != nil {
		return fmt.Errorf("read the switch: %w", err)
	}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the switch: %w", err)
		}
		for _, entity := range answer.Entities {
			if err := found(entity); err != nil {
				return err
			}
		}
	}
}
