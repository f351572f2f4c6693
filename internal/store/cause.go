// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/status"
)

// causes is a logger for etcd's client that keeps only the last error. The client repeats a failing
// request until the time of the request is over. Then its error says only that the time is over.
// The cause is in its log.
type causes struct {
	zapcore.LevelEnabler

	mu   sync.Mutex
	last error
	at   time.Time
}

func newCauses() *causes { return &causes{LevelEnabler: zapcore.WarnLevel} }

// With implements zapcore.Core.
func (c *causes) With([]zapcore.Field) zapcore.Core { return c }

// Check implements zapcore.Core.
func (c *causes) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(entry.Level) {
		return checked.AddCore(entry, c)
	}
	return checked
}

// Write implements zapcore.Core. It keeps the error of a log entry, unless the error only says that
// the time of a request is over.
func (c *causes) Write(_ zapcore.Entry, fields []zapcore.Field) error {
	for _, f := range fields {
		err, ok := f.Interface.(error)
		if !ok || f.Type != zapcore.ErrorType || errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		c.mu.Lock()
		c.last, c.at = err, time.Now()
		c.mu.Unlock()
	}
	return nil
}

// Sync implements zapcore.Core.
func (c *causes) Sync() error { return nil }

// errFull tells that the store has reached its quota. After this error, the transaction may have
// been made or not. A member of etcd checks the quota before it proposes a transaction, and then
// refuses it. The member checks the quota again when it applies the transaction. Then it answers
// with the error although it has applied the transaction (quotaApplierV3.Txn of etcd, 3.4 to 3.7).
var errFull = errors.New("the store is full (etcdctl alarm list)")

// errNoAnswer tells that the store has not answered a request in its time.
var errNoAnswer = errors.New("no answer in time")

// describe returns a short error that says why a request has failed. If the request has timed out,
// the reason is the last error in the client's log. began is when the request began: an earlier
// error in the log belongs to another request.
func (c *causes) describe(err error, began time.Time) error {
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", errFull, err)
	case errors.Is(err, rpctypes.ErrNoLeader): // unchanged, so that untilLeader recognises it
		return err
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		if s, ok := status.FromError(err); ok {
			return errors.New(s.Message())
		}
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil || c.at.Before(began) {
		return errNoAnswer
	}
	return fmt.Errorf("%w: %s", errNoAnswer, status.Convert(c.last).Message())
}
