// SPDX-License-Identifier: Apache-2.0

// Package store shares the services, servers and overrides of a fleet of balancers, and the
// generations of its services, through etcd.
//
// Three parties use the keys. Writers change services, servers and overrides. Each change has a
// number; the key head has the number of the last change. One of the balancers is the leader. It
// releases changes: it writes the generations that follow from a change, and then the number of the
// change into the key release. All balancers follow the released change.
package store

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/stats"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tlsfiles"
)

const (
	// requestTimeout is how long one request to the store may take.
	requestTimeout = 10 * time.Second
	// A ping on each connection finds a connection that has died silently. Members of etcd refuse
	// pings more often than every five seconds (--grpc-keepalive-min-time).
	pingInterval = 6 * time.Second
	pingTimeout  = 3 * time.Second
	// longestDial is how long an attempt to connect may take, and the longest pause before the next
	// one. By default, gRPC's pause grows to two minutes.
	longestDial = 3 * time.Second
	// pageSize is the number of keys in one answer when all keys are read.
	pageSize = 1000
	// batchKeys and batchBytes are the greatest number of operations and the greatest size of a
	// transaction. By default, etcd refuses more than 128 operations and more than 1.5 MiB
	// (--max-txn-ops, --max-request-bytes).
	batchKeys  = 100
	batchBytes = 512 << 10
)

// format is the version of the format of keys and values.
const format = 1

// Store is a connection to the store of a fleet. Several goroutines may use it.
type Store struct {
	client      *clientv3.Client
	connections *connections
	causes      *causes // of failed requests
	prefix      string  // ends with a slash
	name        string  // of this host, in the store
}

// connections counts the connections to the store that were lost. As long as none was lost, the
// store cannot have become another one, and its watches go on.
type connections struct{ ended atomic.Int64 }

func (c *connections) lost() int64 { return c.ended.Load() }

// HandleConn implements stats.Handler. It counts the connections that end.
func (c *connections) HandleConn(_ context.Context, event stats.ConnStats) {
	if _, isEnd := event.(*stats.ConnEnd); isEnd {
		c.ended.Add(1)
	}
}

// TagConn implements stats.Handler.
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (*connections) HandleRPC(context.Context, stats.RPCStats) {}

// TagRPC implements stats.Handler.
func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// The log of gRPC is discarded: it has another form than the log of segue, and the errors reach the
// caller of a request.
func init() { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)) }

// Open returns a connection to the store. It connects in the background, so the store need not be
// reachable. In the store, name marks the changes and the lease of this process. Open returns an
// error if a file of the configuration cannot be read.
func Open(cfg *desired.Etcd, name string) (*Store, error) {
	causes, connections := newCauses(), &connections{}
	var login login
	settings := clientv3.Config{
		Endpoints:            cfg.Endpoints,
		DialKeepAliveTime:    pingInterval,
		DialKeepAliveTimeout: pingTimeout,
		PermitWithoutStream:  true,
		DialTimeout:          requestTimeout,
		Username:             cfg.Username,
		Logger:               zap.New(causes),
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: backoff.Config{
					BaseDelay: firstPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestDial,
				},
				MinConnectTimeout: longestDial,
			}),
			grpc.WithChainUnaryInterceptor(login.intercept),
			grpc.WithStatsHandler(connections),
		},
	}
	var err error
	if settings.TLS, err = tlsOf(cfg); err != nil {
		return nil, err
	}
	if cfg.PasswordFile != "" {
		password, err := os.ReadFile(cfg.PasswordFile)
		if err == nil {
			err = tlsfiles.CheckPrivate(cfg.PasswordFile)
		}
		if err != nil {
			return nil, fmt.Errorf("store.etcd.password-file: %w", err)
		}
		settings.Password = strings.TrimRight(string(password), "\r\n")
	}
	client, err := clientv3.New(settings)
	if err != nil {
		return nil, fmt.Errorf("store.etcd: %w", err)
	}
	login.isOpen.Store(true)
	return &Store{client, connections, causes, Prefix(cfg), name}, nil
}

// login keeps etcd's library from failing when it cannot get a token for its user. The library then
// goes on without a token. It asks for a token again before each stream, and when the store refuses
// a request because the token is missing (ErrUserEmpty).
type login struct{ isOpen atomic.Bool } // isOpen: clientv3.New has returned

// intercept answers some requests for a token as a store without passwords does. So the library
// goes on without a token.
func (l *login) intercept(
	ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	_, isLogin := request.(*etcdserverpb.AuthenticateRequest)
	if isLogin && !l.isOpen.Load() {
		// clientv3.New asks for a token, and would fail if the store does not answer.
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	err := invoke(ctx, method, request, reply, connection, options...)
	if isLogin && errors.Is(rpctypes.Error(err), rpctypes.ErrInvalidAuthToken) {
		// The library sends the old token when it asks for a new one. After a restart, etcd 3.4 does not
		// know the old token, and refuses the request.
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	return err
}

// tlsOf returns the settings of TLS, or nil if the store does not use TLS.
func tlsOf(cfg *desired.Etcd) (*tls.Config, error) {
	if !cfg.UsesTLS() {
		return nil, nil
	}
	return tlsfiles.Client("store.etcd", &cfg.TLSFiles)
}

// Close ends the connection.
func (s *Store) Close() error { return s.client.Close() }

// Prefix returns the prefix of a fleet's keys. It ends with a slash.
func Prefix(cfg *desired.Etcd) string { return strings.TrimSuffix(cfg.Prefix, "/") + "/" }

// key returns a key with the prefix of the fleet.
func (s *Store) key(key string) string { return s.prefix + key }

// head is the value of the key head: the last change of a fleet.
type head struct {
	Format int `json:"format"`
	// Epoch is a random ID that the store gets when it is filled. If it loses its content and is
	// filled again, it gets another epoch.
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"` // the number of the last change
	// Removals is the number of the last change that may remove more servers than the limit, because
	// its writer has permitted it. 0: none.
	Removals uint64 `json:"removals,omitempty"`
	// Drains is the number of the last change whose writer has named each server that the change
	// drains or gives the weight 0. Balancers follow it, however many servers these are. 0: none.
	Drains uint64 `json:"drains,omitempty"`
	// Writing is the number of a change of many keys that is being written. 0: none.
	Writing uint64 `json:"writing,omitempty"`
	// Who is the user that has asked the writer for the change. Empty: unknown.
	Who string `json:"who,omitempty"`
	// By is the name of the writer, a space, and an ID of its attempt.
	By string `json:"by"`
}

// author returns the author of the last change in the form of an event's actor.
func (h *head) author() string {
	writer := withoutID(h.By)
	if h.Who == "" {
		return "store: " + writer
	}
	return fmt.Sprintf("store: %s on %s", h.Who, writer)
}

// release is the value of the key release: the change that balancers follow.
type release struct {
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"`
	By     string `json:"by"`
}

var (
	// ErrEmpty is wrapped in an error if the store has no services.
	ErrEmpty = errors.New("the store has no services: segue store import fills it")
	// ErrVersion is wrapped in an error if the store does not have the expected version.
	ErrVersion = errors.New("the configuration has another version")
	// ErrNotEmpty is wrapped in the error of a change that fills the store, if the store has content.
	ErrNotEmpty = errors.New("the store has content already")
	// ErrUnknown is wrapped in the error of a change if it is unknown whether the change was made.
	ErrUnknown = errors.New("the change may have been made: the store did not answer")
)

// Version identifies the content of a fleet's store after a change.
type Version struct {
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"`
}

// String returns the version as EPOCH-CHANGE.
func (v Version) String() string { return fmt.Sprintf("%s-%d", v.Epoch, v.Change) }

// ParseVersion reads a version in the form EPOCH-CHANGE.
func ParseVersion(text string) (Version, error) {
	epoch, number, _ := strings.Cut(text, "-")
	change, err := strconv.ParseUint(number, 10, 64)
	if err != nil || epoch == "" {
		return Version{}, fmt.Errorf("version %q: must be EPOCH-CHANGE", text)
	}
	return Version{epoch, change}, nil
}

func newID() string { return strings.ToLower(rand.Text()[:12]) }

// withoutID returns the name in a value that consists of a name, a space and an ID. It returns an
// empty string if the value has no space.
func withoutID(value string) string { return value[:max(0, strings.LastIndex(value, " "))] }

func encode(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // the values here have only numbers and strings
	}
	return string(text)
}
