// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
)

// shutdownTimeout is how long requests may continue after the context has ended.
const shutdownTimeout = time.Second

// ServeHTTP answers requests until the context ends. It returns earlier only if there is an error.
func ServeHTTP(ctx context.Context, server *http.Server, listener net.Listener) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		// The context has ended, so Shutdown needs another one to wait for the remaining requests.
		patience, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if server.Shutdown(patience) != nil {
			return server.Close() // aborts the remaining requests
		}
		return nil
	})
	return group.Wait()
}
