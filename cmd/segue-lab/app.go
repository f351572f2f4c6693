// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/lab/application"
	"github.com/segue-lb/segue/research/sim/processor"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// appFlags has the values of the flags that need to be parsed.
type appFlags struct {
	discipline, demand, table, colocated string
}

func newApp() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "app",
		Short: "Run an application server whose processors are emulated",
		Long: `App is an HTTP server for the lab. A request takes as long as its work would take on the
given cores, while other requests share them. The cores are emulated by timers, so many
servers run on a small machine.

A request may name its work, as in /?work=190ms. Otherwise the work comes from the table
of --demand-table, or is drawn from the distribution of --demand. Without these flags, the
request has no work. A worker serves one connection at a time. While all workers are busy,
connections wait in the kernel's accept queue. docs/research/application.md describes the
server.`,
		Example: "  segue-lab app --listen :8080 --cores 2 --demand 'exponential: 190ms'\n" +
			"  segue-lab app --listen :8080 --speed 0.5 --colocated 50%@60s,0%@120s",
		Args: cli.Arguments(),
	}
	host, _ := os.Hostname() // without one, --name is required
	c := application.Config{}
	var f appFlags
	flags := cmd.Flags()
	flags.StringVar(&c.Name, "name", host, "`name` of the server in responses")
	flags.StringSliceVar(&c.Listen, "listen", []string{":8080"},
		"`address` and port to serve on; may be given several times")
	flags.IntVar(&c.Backlog, "backlog", 128,
		"`count` of connections that may wait for a worker; the kernel's limit is net.core.somaxconn")
	flags.IntVar(&c.Workers, "workers", 32, "`count` of connections that are served at the same time")
	flags.IntVar(&c.Processors.Cores, "cores", 2, "`count` of emulated cores")
	flags.Float64Var(&c.Processors.Speed, "speed", 1,
		"speed of a core, a `number`: work of 1s takes 1s divided by it")
	flags.StringVar(&f.discipline, "discipline", "processor-sharing",
		"how requests share the cores, a `name`: processor-sharing or fifo")
	flags.StringVar(&f.demand, "demand", "",
		"`distribution` from which work is drawn, such as 'exponential: 190ms'")
	flags.StringVar(&f.table, "demand-table", "",
		"`file` with the work of queries, in lines of query<TAB>work")
	flags.Uint64Var(&c.Demand.Seed, "seed", 1, "`number` that seeds the work that is drawn")
	flags.StringVar(&f.colocated, "colocated", "",
		"`schedule` of co-located work, which takes a share of the cores, such as 50%@60s,0%@120s")
	flags.StringSliceVar(&c.Loads, "load", nil,
		"`file` in which to report the number of busy workers (load source shared-memory), or pin of a "+
			"map (shared-map); may be given several times")
	flags.StringVar(&c.Files, "files", "", "`folder` with files that are served without work")
	flags.StringVar(&c.Uploads, "uploads", "", "`folder` in which PUT /upload/NAME stores files")
	flags.StringVar(&c.Control, "control", "",
		"`address` on which to show the state and change the co-located work")
	flags.DurationVar(&c.Idle, "idle-timeout", time.Minute,
		"`duration` that a worker waits for a request on an open connection")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := f.parse(&c); err != nil {
			return err
		}
		limitAppResources()
		c.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
		if err := runApp(cmd.Context(), c); err != nil {
			return fmt.Errorf("app: %w", err)
		}
		return nil
	}
	return cmd
}

// runApp runs a server until the context ends.
func runApp(ctx context.Context, c application.Config) error {
	server, err := application.New(ctx, c)
	if err != nil {
		return err
	}
	c.Log.Info("serving", "name", c.Name, "listen", c.Listen, "workers", c.Workers,
		"cores", c.Processors.Cores, "speed", c.Processors.Speed)
	if err := daemon.Notify("READY=1"); err != nil {
		return errors.Join(err, server.Close())
	}
	if err := server.Run(ctx); err != nil {
		return err
	}
	c.Log.Info("stopped", "cause", context.Cause(ctx))
	return nil
}

// limitAppResources limits what this process takes from the machine, because a lab runs many
// servers. One thread is enough for the real work of a server. The heap is only a few megabytes, so
// it may grow more than by default before the garbage collector runs.
func limitAppResources() {
	const heapGrowth = 400 // percent
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(heapGrowth)
}

// parse stores the values of the flags in the configuration, and checks the configuration.
func (f *appFlags) parse(c *application.Config) (err error) {
	if c.Processors.Discipline, err = processor.ParseDiscipline(f.discipline); err != nil {
		return fmt.Errorf("--discipline %q: %w", f.discipline, err)
	}
	if f.demand != "" {
		d, err := scenario.ParseDistribution(f.demand, ".")
		if err != nil {
			return fmt.Errorf("--demand %q: %w", f.demand, err)
		}
		c.Demand.Drawn = &d
	}
	if f.table != "" {
		if c.Demand.Table, err = application.LoadTable(f.table); err != nil {
			return fmt.Errorf("--demand-table: %w", err)
		}
	}
	if c.Colocated, err = application.ParseSchedule(f.colocated); err != nil {
		return fmt.Errorf("--colocated %w", err)
	}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("--%w", err) // the flags have the names of the fields
	}
	return nil
}
