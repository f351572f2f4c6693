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

// causes remembers the last error that the client of etcd has logged. The client tries again until
// the time of a request is over, and then tells only that.
type causes struct {
	zapcore.LevelEnabler

	mu   sync.Mutex
	last error
	at   time.Time
}

func newCauses() *causes { return &causes{LevelEnabler: zapcore.WarnLevel} }

// With is for the logger.
func (c *causes) With([]zapcore.Field) zapcore.Core { return c }

// Check is for the logger.
func (c *causes) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(entry.Level) {
		return checked.AddCore(entry, c)
	}
	return checked
}

// Write notes the error of a log entry.
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

// Sync is for the logger.
func (c *causes) Sync() error { return nil }

// errFull tells that the store has reached its quota. It says so to a transaction that it has
// refused, and also to one that it has made and that has crossed the quota: a member checks the quota
// before it proposes a transaction, and again when it applies it, and then answers with the error
// after it has applied it (quotaApplierV3.Txn of etcd, 3.4 to 3.7).
var errFull = errors.New("the store is full (etcdctl alarm list)")

// errNoAnswer tells that the time of a request has ended.
var errNoAnswer = errors.New("no answer in time")

// describe says in a few words why a request that began at a time has failed.
func (c *causes) describe(err error, began time.Time) error {
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", errFull, err)
	case errors.Is(err, rpctypes.ErrNoLeader): // for untilLeader
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
