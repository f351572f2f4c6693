// SPDX-License-Identifier: Apache-2.0

// Package store shares the services, servers and overrides of a fleet of balancers, and the
// generations of its services, through etcd.
//
// Three parties use the keys. Writers change services, servers and overrides. Each change has a
// number, and the key head has the number of the last one. The leader, one of the balancers,
// releases changes: it writes the generations that follow from a change, and then its number into
// the key release. Balancers follow the released change.
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
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/stats"

	"github.com/segue-lb/segue/internal/desired"
)

const (
	// requestTimeout bounds the time of one request to the store.
	requestTimeout = 10 * time.Second
	// pingInterval and pingTimeout find a connection that has died silently. Members of etcd refuse
	// pings more often than every five seconds (--grpc-keepalive-min-time).
	pingInterval = 6 * time.Second
	pingTimeout  = 3 * time.Second
	// longestDial bounds the time of an attempt to connect, and the pause before the next one. By
	// default a pause grows to two minutes.
	longestDial = 3 * time.Second
	// pageSize is the number of keys of one answer when all keys are read.
	pageSize = 1000
	// batchKeys and batchBytes bound a transaction. etcd refuses more than 128 operations and more
	// than 1.5 MiB, unless it is configured otherwise (--max-txn-ops, --max-request-bytes).
	batchKeys  = 100
	batchBytes = 512 << 10
)

// format is the version of the keys' format.
const format = 1

// Store is a connection to the store of a fleet. Several goroutines may use it.
type Store struct {
	client      *clientv3.Client
	connections *connections
	causes      *causes // of failures
	prefix      string  // ends with a slash
	name        string  // of this host, in the store
}

// connections counts the connections that were lost. A store is the same as before, and continues its
// watches, as long as none was lost.
type connections struct{ ended atomic.Int64 }

func (c *connections) lost() int64 { return c.ended.Load() }

// HandleConn is for the library.
func (c *connections) HandleConn(_ context.Context, event stats.ConnStats) {
	if _, isEnd := event.(*stats.ConnEnd); isEnd {
		c.ended.Add(1)
	}
}

// TagConn is for the library.
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleRPC is for the library.
func (*connections) HandleRPC(context.Context, stats.RPCStats) {}

// TagRPC is for the library.
func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// The library logs in a form of its own. Its errors reach the caller.
func init() { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)) }

// Open returns a connection to the store. It connects in the background, so the store need not be
// reachable. The name tells others who changes the store or holds the lease. Open returns an error
// if a file of the configuration cannot be read.
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
		Logger:               zap.New(causes), // errors reach the caller
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
			err = checkPrivate(cfg.PasswordFile)
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

// login makes the library forgo a token when it cannot get one. Without a token, the library gets one
// when the store refuses a request (ErrUserEmpty), and before each stream.
type login struct{ isOpen atomic.Bool }

// intercept answers some requests for a token as a store without passwords does.
func (l *login) intercept(
	ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	_, isLogin := request.(*etcdserverpb.AuthenticateRequest)
	if isLogin && !l.isOpen.Load() {
		// New would return an error if the store does not answer.
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	err := invoke(ctx, method, request, reply, connection, options...)
	if isLogin && errors.Is(rpctypes.Error(err), rpctypes.ErrInvalidAuthToken) {
		// The library asks for a new token with the old one. After a restart, etcd 3.4 does not know
		// that one, and refuses.
		return rpctypes.ErrGRPCAuthNotEnabled
	}
	return err
}

// tlsOf returns the settings of TLS, or nil without it. The certificate is read again for each
// connection, so it can be renewed without a restart.
func tlsOf(cfg *desired.Etcd) (*tls.Config, error) {
	if !cfg.UsesTLS() {
		return nil, nil
	}
	if cfg.KeyFile != "" {
		if err := checkPrivate(cfg.KeyFile); err != nil {
			return nil, fmt.Errorf("store.etcd.key-file: %w", err)
		}
	}
	info := transport.TLSInfo{TrustedCAFile: cfg.CAFile, CertFile: cfg.CertFile, KeyFile: cfg.KeyFile}
	settings, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("store.etcd: %w", err)
	}
	return settings, nil
}

// checkPrivate returns an error if others than the owner of a file and its group may use it.
func checkPrivate(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if mode := info.Mode().Perm(); mode&0o007 != 0 {
		return fmt.Errorf("%s has mode %04o: everybody may use it; 0600 or 0640 is right", path, mode)
	}
	return nil
}

// Close ends the connection.
func (s *Store) Close() error { return s.client.Close() }

// Prefix returns the first part of the keys of a fleet. It ends with a slash.
func Prefix(cfg *desired.Etcd) string { return strings.TrimSuffix(cfg.Prefix, "/") + "/" }

// key returns a key with the prefix of the fleet.
func (s *Store) key(key string) string { return s.prefix + key }

// head is the last change of a fleet.
type head struct {
	Format int `json:"format"`
	// Epoch identifies the store since it was filled. A store that has lost its content and was
	// filled again has another one.
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"`
	// Removals is the last change whose writer has permitted it to remove more servers than the
	// limit. 0: none.
	Removals uint64 `json:"removals,omitempty"`
	// Drains is the last change whose writer has named each server that it drains or gives the weight 0.
	// Balancers follow it whatever the number of these servers.
	Drains uint64 `json:"drains,omitempty"`
	// Writing is the number of a change of many keys that is being written. 0: none.
	Writing uint64 `json:"writing,omitempty"`
	// Who is the user that has asked the writer for the change. Empty: not known.
	Who string `json:"who,omitempty"`
	// By names the writer, and identifies its attempt.
	By string `json:"by"`
}

// author returns the actor of the last change, for events.
func (h *head) author() string {
	writer := h.By[:max(0, strings.LastIndex(h.By, " "))]
	if h.Who == "" {
		return "store: " + writer
	}
	return fmt.Sprintf("store: %s on %s", h.Who, writer)
}

// release is the change that balancers follow.
type release struct {
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"`
	By     string `json:"by"`
}

var (
	// ErrEmpty is wrapped in an error if the store has no head, and so no services.
	ErrEmpty = errors.New("the store has no services: segue store import fills it")
	// ErrVersion is wrapped in an error if the store has another version than expected.
	ErrVersion = errors.New("the configuration has another version")
	// ErrNotEmpty is wrapped in an error if a store to be filled has content.
	ErrNotEmpty = errors.New("the store has content already")
	// ErrUnknown is wrapped in an error if it is not known whether a change was made.
	ErrUnknown = errors.New("the change may have been made: the store did not answer")
)

// Version identifies a change of a fleet.
type Version struct {
	Epoch  string `json:"epoch"`
	Change uint64 `json:"change"`
}

// String returns the version as EPOCH-CHANGE.
func (v Version) String() string { return fmt.Sprintf("%s-%d", v.Epoch, v.Change) }

// ParseVersion is the reverse of String.
func ParseVersion(text string) (Version, error) {
	epoch, number, _ := strings.Cut(text, "-")
	change, err := strconv.ParseUint(number, 10, 64)
	if err != nil || epoch == "" {
		return Version{}, fmt.Errorf("version %q: must be EPOCH-CHANGE", text)
	}
	return Version{epoch, change}, nil
}

func newID() string { return strings.ToLower(rand.Text()[:12]) }

func encode(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // only numbers and strings
	}
	return string(text)
}
